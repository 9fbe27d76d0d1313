"""Attributes replaced while a simulation is active, and put back when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

_ABSENT = object()


class Patches:
    """A list of attribute replacements that can be applied and undone any number of times."""

    def __init__(self) -> None:
        self._planned: list[tuple[Any, str, Any]] = []
        self._saved: list[tuple[Any, str, Any]] = []
        self._wrappable: set[int] = set()

    def plan(self, owner: Any, name: str, value: Any, *, wrappable: bool = False) -> None:
        """Replace ``owner.name`` by ``value`` whenever the patches are applied.

        ``wrappable`` says that a library may wrap it for good when it is imported: the wrapper then
        stays where it is, and ``value`` does what stood there before while nothing is applied.
        """
        self._planned.append((owner, name, value))
        if wrappable:
            self._wrappable.add(id(value))

    @property
    def planned(self) -> Sequence[tuple[Any, str, Any]]:
        """Owner, name and replacement, in the order they were planned."""
        return self._planned

    @property
    def are_applied(self) -> bool:
        """Whether anything is replaced now."""
        return bool(self._saved)

    def apply(self) -> None:
        """Make every planned replacement, remembering what stood there."""
        for owner, name, value in self._planned:
            # vars(), not getattr(): what a class inherits must come back by deletion.
            before = vars(owner).get(name, _ABSENT)
            if not self._is_wrapped(before):
                self._saved.append((owner, name, before))
                setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, last replacement first."""
        while self._saved:
            owner, name, value = self._saved.pop()
            if self._is_wrapped(vars(owner).get(name)):
                continue
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def _is_wrapped(self, value: Any) -> bool:
        """Whether ``value`` wraps a replacement that may be wrapped."""
        return bool(self._wrappable) and id(_wrapped_by(value)) in self._wrappable


def _wrapped_by(value: Any) -> Any:
    return vars(value).get("__wrapped__") if isinstance(value, FunctionType) else None
