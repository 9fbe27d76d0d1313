"""Changes of modules that the code under test may import later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import get_ident
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]
Context = Callable[[], AbstractContextManager[object]]


@contextmanager
def when_imported(changes: Mapping[str, Change]) -> Iterator[None]:
    """Apply the change of each module that is imported now, or as soon as it is inside."""
    finder = from_now_on(changes)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def from_now_on(changes: Mapping[str, Change], executed: Context = nullcontext) -> MetaPathFinder:
    """Apply the change of each module that is imported now or later; return the finder that does.

    A module that is imported later is executed in a context of its own.
    """
    finder = _Finder(changes, executed)
    for name, change in changes.items():
        if (module := sys.modules.get(name)) is not None:
            change(module)
    sys.meta_path.insert(0, finder)
    return finder


class _Finder(MetaPathFinder):
    def __init__(self, changes: Mapping[str, Change], executed: Context) -> None:
        self._changes = changes
        self._executed = executed
        self._busy: set[int] = set()
        """Threads that ask the other finders, of which one may ask this one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have; its loader applies the change."""
        change, thread = self._changes.get(fullname), get_ident()
        if change is None or thread in self._busy:
            return None
        self._busy.add(thread)
        try:
            spec = spec_of_others(fullname, path, target)
        finally:
            self._busy.discard(thread)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, change, self._executed)
        return spec


def spec_of_others(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Return the spec that the finders have, for one of them that now answers ``None`` itself."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
        if spec is not None:
            return spec
    return None


def is_only_asked() -> bool:
    """Return whether ``importlib.util.find_spec`` calls the finder that calls this.

    It then looks whether there is a module, and imports none.
    """
    return sys._getframe(3).f_globals.get("__name__") == "importlib.util"


class _Changing(Loader):
    def __init__(self, loader: Loader, change: Change, executed: Context) -> None:
        self._loader = loader
        self._change = change
        self._executed = executed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the other loader makes, which may put itself into ``spec``."""
        try:
            return self._loader.create_module(spec)
        finally:
            spec.loader = self

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then change it."""
        with self._executed():
            self._loader.exec_module(module)
        self._change(module)
