"""The visibility of the dry device: only in marked tests and their fixtures, like a simulated one.

The runtime itself always reports the devices, because c10 reads their number only once in a process
(``device_count`` of c10/cuda/CUDAFunctions.cpp). So torch's Python functions on devices are
replaced by ones that report no device outside of such tests. Tensors are made in C++ all the same,
so the plugin fails other tests that have allocated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from pytest_gpumem.cached_answers import clear_cached_answers, watch
from pytest_gpumem.garbage import importing


class _Scope:
    def __init__(self) -> None:
        self.is_open = True
        self.is_closed_to_children = False
        self.is_limited = False
        """Whether the functions have been replaced, which is never undone."""


_SCOPE = _Scope()


def close(*, to_children: bool) -> None:
    """Hide the devices from now on, except inside :func:`opened`; torch may be imported later.

    With ``to_children``, child processes started outside of it have no device either.
    """
    _SCOPE.is_open = False
    _SCOPE.is_closed_to_children = to_children
    if to_children:
        from pytest_gpumem.dry.load import disinherit

        disinherit()
    if not _SCOPE.is_limited:
        _SCOPE.is_limited = True
        watch(_scoped, executed=importing)


@contextmanager
def opened(*, to_children: bool = True) -> Iterator[None]:
    """Show the devices inside, and with ``to_children`` also in processes started inside."""
    with clear_cached_answers():
        if _SCOPE.is_open:
            yield
            return
        _SCOPE.is_open = True
        try:
            with _inherited() if to_children else nullcontext():
                yield
        finally:
            _SCOPE.is_open = False


def hidden_allocations() -> int:
    """Return how often this process has allocated on the devices; 0 while they are not hidden."""
    torch = sys.modules.get("torch")
    if _SCOPE.is_open or not _SCOPE.is_limited or torch is None or not torch.cuda.is_initialized():
        return 0
    with opened(to_children=False):
        stats = map(torch._C._cuda_memoryStats, range(torch.cuda.device_count()))
        return sum(one["allocation"]["all"]["allocated"] for one in stats)


def _inherited() -> AbstractContextManager[None]:
    if not _SCOPE.is_closed_to_children:
        return nullcontext()
    from pytest_gpumem.dry.load import inherited

    return inherited()


def _scoped(function: Callable[..., Any], answer: object) -> Callable[..., Any]:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _SCOPE.is_open else answer

    return scoped
