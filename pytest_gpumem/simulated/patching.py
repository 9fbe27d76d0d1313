"""Attributes replaced while a simulation is active, and put back when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ABSENT = object()


class Patches:
    """A list of attribute replacements that can be applied and undone any number of times."""

    def __init__(self) -> None:
        self._planned: list[tuple[Any, str, Any]] = []
        self._saved: list[tuple[Any, str, Any]] = []

    def plan(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name`` by ``value`` whenever the patches are applied."""
        self._planned.append((owner, name, value))

    @property
    def planned(self) -> Sequence[tuple[Any, str, Any]]:
        """Owner, name and replacement, in the order they were planned."""
        return self._planned

    def apply(self) -> None:
        """Make every planned replacement, remembering what stood there."""
        for owner, name, value in self._planned:
            # vars(), not getattr(): what a class inherits must come back by deletion.
            self._saved.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, last replacement first."""
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
