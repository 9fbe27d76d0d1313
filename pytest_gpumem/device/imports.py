"""Imports inside a measured test, which keep no tensor of the test alive.

A module is imported once in a process. A frame object that outlives the import refers to the frame
that called it (``f_back``), and so on up to the test's own; it keeps the local variables of all of
them alive until the collector runs, or for good. Two kinds of code leave such frames behind: a
function that has its own frame in a local variable (``wrap`` in torch/fx/_symbolic_trace.py), and
an exception that is stored or is part of a cycle of references. The first
``torch.utils.checkpoint.checkpoint`` of a process imports ``torch._dynamo`` with its input in
reach (``inner`` in torch/_compile.py). The test that happens to be the first would then need more
memory than the same test later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from gc import get_objects, get_stats
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import chain
from threading import get_ident
from types import FrameType, ModuleType

_YOUNG = (0, 1)
"""Generations that have all objects made since a test began, unless the oldest was collected."""

_OLDEST = 2


@contextmanager
def imports_watched() -> Iterator[None]:
    """Let go of the frames that an import inside leaves behind, when it ends."""
    watch = _ImportWatch()
    sys.meta_path.insert(0, watch)
    try:
        yield
    finally:
        sys.meta_path.remove(watch)


class _ImportWatch(MetaPathFinder):
    """Finds modules as the other finders do, and sees when the outermost import ends."""

    def __init__(self) -> None:
        self._busy: set[int] = set()
        """Threads that are importing something."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that another finder has; its loader tells when the module has run."""
        thread = get_ident()
        if thread in self._busy or _is_only_asked():
            return None
        self._busy.add(thread)  # finders import, too
        try:
            spec = self._found(fullname, path, target)
        finally:
            self._busy.discard(thread)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _TidyLoader(spec.loader, self._busy)
        return spec

    def _found(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                spec: ModuleSpec | None = find(fullname, path, target)
                if spec is not None:
                    return spec
        return None


def _is_only_asked() -> bool:
    """Whether the finders are asked by ``importlib.util.find_spec`` and not by an import."""
    return sys._getframe(3).f_globals.get("__name__") == "importlib.util"


class _TidyLoader(Loader):
    """Gives the module its own loader back, lets it run, and tidies up behind it."""

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
        collected = get_stats()[-1]["collections"]
        try:
            self._loader.exec_module(module)
        finally:
            self._busy.discard(thread)
        is_young = get_stats()[-1]["collections"] == collected
        _let_go_of(sys._getframe(), _YOUNG if is_young else (*_YOUNG, _OLDEST))


def _let_go_of(importing: FrameType, generations: Sequence[int]) -> None:
    """Clear the frames below ``importing`` that are left, and the tracebacks that hold some."""
    left: list[FrameType] = []
    for each in chain.from_iterable(map(get_objects, generations)):
        # Proxies tell what they stand for: type() asks the object itself.
        kind = type(each)
        if kind is FrameType:
            if _is_below(each, importing):
                left.append(each)
        elif issubclass(kind, BaseException):
            traceback = each.__traceback__
            if traceback is not None and _is_below(traceback.tb_frame, importing):
                each.__traceback__ = None
    for frame in left:
        with suppress(RuntimeError):  # it runs, in another thread
            frame.clear()


def _is_below(frame: FrameType, importing: FrameType) -> bool:
    caller = frame.f_back
    while caller is not None:
        if caller is importing:
            return True
        caller = caller.f_back
    return False
