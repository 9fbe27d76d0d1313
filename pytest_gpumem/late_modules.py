"""Changes of modules that the code under test may import later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import get_ident
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]
Context = Callable[[], AbstractContextManager[object]]


def when_imported(changes: Mapping[str, Change]) -> AbstractContextManager[None]:
    """Apply the change of each module that is imported already, or when it is imported inside."""
    return watched(changing(changes))


def changing(changes: Mapping[str, Change], executed: Context = nullcontext) -> Finder:
    """Apply the changes of modules that are imported already; return a finder for later ones.

    A module that is imported later is executed in a context of ``executed``.
    """

    def wrapper_of(name: str) -> Callable[[Loader], Loader] | None:
        return partial(_Changing, changes[name], executed) if name in changes else None

    finder = Finder(wrapper_of, set())
    for name, change in changes.items():
        if (module := sys.modules.get(name)) is not None:
            change(module)
    return finder


@contextmanager
def watched(finder: MetaPathFinder) -> Iterator[None]:
    """Put ``finder`` before all other finders for imports inside."""
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class Finder(MetaPathFinder):
    """A finder that delegates to the other finders, and wraps the loaders of some modules.

    ``wrapper_of`` returns a wrapper by a module's name, ``None`` for modules that stay unchanged.
    A thread is ``busy`` inside the other finders, because one of them may call this one.
    """

    def __init__(
        self, wrapper_of: Callable[[str], Callable[[Loader], Loader] | None], busy: set[int]
    ) -> None:
        self._wrapper_of = wrapper_of
        self._busy = busy

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders, with a wrapped loader."""
        thread = get_ident()
        if thread in self._busy or (wrapper := self._wrapper_of(fullname)) is None:
            return None
        self._busy.add(thread)
        try:
            finders = [one for one in sys.meta_path if hasattr(one, "find_spec")]
            specs = (one.find_spec(fullname, path, target) for one in finders)
            spec = next(filter(None, specs), None)
        finally:
            self._busy.discard(thread)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = wrapper(spec.loader)
        return spec


class Wrapped(Loader):
    """A loader that delegates to another one, which it sets as the module's loader."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module made by the wrapped loader."""
        spec.loader = self.loader
        try:
            return self.loader.create_module(spec)
        finally:
            spec.loader = self

    def exec_module(self, module: ModuleType) -> None:
        """Run the code of ``module``."""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = self.loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self.loader
        self.loader.exec_module(module)


def is_find_spec() -> bool:
    """Return whether ``importlib.util.find_spec`` has called the finder that calls this.

    Then the module is only searched, and not imported. There is one frame between the two.
    """
    return sys._getframe(4).f_globals.get("__name__") == "importlib.util"


class _Changing(Wrapped):
    def __init__(self, change: Change, executed: Context, loader: Loader) -> None:
        super().__init__(loader)
        self._change = change
        self._executed = executed

    def exec_module(self, module: ModuleType) -> None:
        with self._executed():
            super().exec_module(module)
        self._change(module)
