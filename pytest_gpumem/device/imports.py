"""Imports inside a measured test, which keep no tensor of the test alive.

A module is imported once in a process, and the frames that its import leaves behind keep local
variables of the test alive (:class:`~pytest_gpumem.garbage.FramesLetGo`). The first
``torch.utils.checkpoint.checkpoint`` of a process imports ``torch._dynamo`` with its input in
reach (``inner`` in torch/_compile.py). The test that happens to be the first would then need more
memory than the same test later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import get_ident
from types import ModuleType

from pytest_gpumem.garbage import FramesLetGo
from pytest_gpumem.late_modules import is_only_asked, spec_of_others


@contextmanager
def imports_watched() -> Iterator[None]:
    """Clear the frames that an import inside leaves behind, when it ends."""
    watch = _ImportWatch()
    sys.meta_path.insert(0, watch)
    try:
        yield
    finally:
        sys.meta_path.remove(watch)


class _ImportWatch(MetaPathFinder):
    """A finder that delegates to the other finders, and detects the end of the outermost import."""

    def __init__(self) -> None:
        self._busy: set[int] = set()
        """Threads that are importing something."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that another finder has; its loader reports when the module has run."""
        thread = get_ident()
        if thread in self._busy or is_only_asked():
            return None
        self._busy.add(thread)  # finders import, too
        try:
            spec = spec_of_others(fullname, path, target)
        finally:
            self._busy.discard(thread)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _TidyLoader(spec.loader, self._busy)
        return spec


class _TidyLoader(Loader):
    """A loader that restores the module's own loader, runs it, and clears its left frames."""

    def __init__(self, loader: Loader, busy: set[int]) -> None:
        self._loader = loader
        self._busy = busy

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the loader makes."""
        spec.loader = self._loader
        try:
            return self._loader.create_module(spec)
        finally:
            spec.loader = self

    def exec_module(self, module: ModuleType) -> None:
        """Run the code of ``module``."""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        thread = get_ident()
        self._busy.add(thread)
        try:
            with FramesLetGo():
                self._loader.exec_module(module)
        finally:
            self._busy.discard(thread)
