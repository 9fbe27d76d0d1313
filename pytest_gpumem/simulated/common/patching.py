"""Attributes replaced while a simulation is active, and put back when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

_ABSENT = object()


@dataclass
class _Replaced:
    owner: Any
    name: str
    value: Any
    before: Any

    @property
    def present(self) -> Any:
        # vars(), not getattr(): what a class inherits must come back by deletion.
        return vars(self.owner).get(self.name, _ABSENT)

    def replace(self) -> None:
        self.before = self.present
        setattr(self.owner, self.name, self.value)

    def put_back(self) -> None:
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class Patches:
    """A list of attribute replacements that can be applied and undone any number of times."""

    def __init__(self) -> None:
        self._planned: list[tuple[Any, str, Any]] = []
        self._replaced: list[_Replaced] = []
        self._is_paused = False
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
        return bool(self._replaced) and not self._is_paused

    def apply(self) -> None:
        """Make every planned replacement, remembering what stood there."""
        for owner, name, value in self._planned:
            replaced = _Replaced(owner, name, value, _ABSENT)
            if not self._is_wrapped(replaced.present):
                self._replaced.append(replaced)
                replaced.replace()

    def undo(self) -> None:
        """Put everything back, last replacement first."""
        while self._replaced:
            replaced = self._replaced.pop()
            if not self._is_wrapped(replaced.present):
                replaced.put_back()

    @contextmanager
    def paused(self, but: Callable[[Any, str, Any], bool] | None = None) -> Iterator[None]:
        """Put everything back inside, but for what somebody else has replaced since.

        What stands there at the end is what comes back by :meth:`undo`: who is imported inside may
        have set it. ``but`` is told an owner, a name and a replacement that is to stay.
        """
        paused: list[_Replaced] = []
        for replaced in reversed(self._replaced):
            if but is not None and but(replaced.owner, replaced.name, replaced.value):
                continue
            if replaced.present is replaced.value:
                replaced.put_back()
                paused.append(replaced)
        before, self._is_paused = self._is_paused, self._is_paused or but is None
        try:
            yield
        finally:
            self._is_paused = before
            for replaced in reversed(paused):
                replaced.replace()

    def _is_wrapped(self, value: Any) -> bool:
        """Whether ``value`` wraps a replacement that may be wrapped."""
        return bool(self._wrappable) and id(_wrapped_by(value)) in self._wrappable


def _wrapped_by(value: Any) -> Any:
    return vars(value).get("__wrapped__") if isinstance(value, FunctionType) else None
