"""The visibility of the dry device: in marked tests and their fixtures, like the simulated one.

The CUDA runtime always answers, because c10 reads the number of devices once in a process and keeps
it (``device_count`` of c10/cuda/CUDAFunctions.cpp). So Python's functions on devices are replaced,
and return that there are none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ANSWERS: dict[str, dict[str, object]] = {
    "torch.cuda": {"is_available": False, "device_count": 0},
    "torch.accelerator": {
        "is_available": False,
        "device_count": 0,
        "current_accelerator": None,
    },
}
"""Results of functions where there is no device, by module."""


class _Scope:
    def __init__(self) -> None:
        self.is_open = True


_SCOPE = _Scope()


def close() -> None:
    """Hide the devices from now on, except inside :func:`opened`; torch may be imported later."""
    _SCOPE.is_open = False
    for name in _ANSWERS:
        if name in sys.modules:
            _replace(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@contextmanager
def opened() -> Iterator[None]:
    """Show the devices inside."""
    before, _SCOPE.is_open = _SCOPE.is_open, True
    try:
        yield
    finally:
        _SCOPE.is_open = before


def _replace(module: ModuleType) -> None:
    for name, answer in _ANSWERS[module.__name__].items():
        function = getattr(module, name, None)
        if function is not None and not hasattr(function, "__wrapped__"):
            setattr(module, name, _scoped(function, answer))


def _scoped(function: Callable[..., Any], answer: object) -> Callable[..., Any]:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _SCOPE.is_open else answer

    return scoped


class _Finder(MetaPathFinder):
    """A finder that replaces the functions as soon as their module has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have, with a loader that replaces functions."""
        if fullname not in _ANSWERS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None
            if finder is not self and find is not None:
                spec = find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Replacing(spec.loader)
                return spec
        return None


class _Replacing(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the other loader makes."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then replace its functions."""
        self._loader.exec_module(module)
        _replace(module)
