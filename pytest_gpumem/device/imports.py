"""Imports inside a measured test, which keep no tensor of the test alive.

A module is imported once in a process, and the frames that its import leaves behind keep local
variables of the test alive (:class:`~pytest_gpumem.garbage.FramesLetGo`). The first
``torch.utils.checkpoint.checkpoint`` of a process imports ``torch._dynamo`` with its input in
reach (``inner`` in torch/_compile.py). The test that happens to be the first would then need more
memory than the same test later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader
from threading import get_ident
from types import ModuleType

from pytest_gpumem.garbage import FramesLetGo
from pytest_gpumem.late_modules import Finder, Wrapped, is_only_asked


@contextmanager
def imports_watched() -> Iterator[None]:
    """Clear the frames that an import inside leaves behind, when it ends."""
    busy: set[int] = set()
    """Threads that are importing something: what they import inside is theirs."""

    def wrapper_of(name: str) -> Callable[[Loader], Loader] | None:
        return None if is_only_asked(below=1) else partial(_TidyLoader, busy)

    finder = Finder(wrapper_of, busy)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _TidyLoader(Wrapped):
    def __init__(self, busy: set[int], loader: Loader) -> None:
        super().__init__(loader)
        self._busy = busy

    def exec_module(self, module: ModuleType) -> None:
        thread = get_ident()
        self._busy.add(thread)
        try:
            with FramesLetGo():
                super().exec_module(module)
        finally:
            self._busy.discard(thread)
