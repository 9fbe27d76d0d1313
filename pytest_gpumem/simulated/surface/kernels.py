"""Functions of compiled extensions, whose kernels nobody but they know.

A description (:mod:`pytest_gpumem.simulated.operators.described`) runs in their place; without one
the test is skipped with a sentence that names them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from types import FunctionType
from typing import Any, NoReturn

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.operators.described import tensors_in

_TENSOR_IN_SIGNATURE = ("torch.Tensor", "at::Tensor")
"""How pybind11 spells a tensor argument in the signature that begins a function's docstring
(torch/csrc/utils/pybind.h, PYBIND11_TYPE_CASTER of at::Tensor)."""


def _refuse(path: str, what: str) -> NoReturn:
    raise UnsupportedOperatorError(
        f"{path} at {user_line()} is {what}, which a simulated GPU cannot run: say what it "
        f'allocates with pytest_gpumem.simulate_operator("{path}")'
    )


class Extensions:
    """Functions of compiled extensions that take tensors; on a simulated GPU they would crash."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._found: list[tuple[Any, str, _Guarded]] = []

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep tensors of a simulated GPU from the extensions imported so far."""
        self._look()
        patches = Patches()
        for module, name, guard in self._found:
            patches.plan(module, name, guard)
        patches.apply()
        try:
            yield
        finally:
            patches.undo()

    def _look(self) -> None:
        for name in [name for name in sys.modules if name not in self._seen]:
            self._seen.add(name)
            module = sys.modules[name]
            loader = getattr(getattr(module, "__spec__", None), "loader", None)
            if not isinstance(loader, ExtensionFileLoader) or name.startswith("torch."):
                continue
            for attribute, value in vars(module).items():
                if _takes_tensors(value):
                    guard = _Guarded(value, f"{name}.{attribute}")
                    self._found.append((module, attribute, guard))


def _takes_tensors(value: Any) -> bool:
    if isinstance(value, (type, FunctionType)) or not callable(value):
        return False
    signature = getattr(value, "__doc__", None)
    return isinstance(signature, str) and any(kind in signature for kind in _TENSOR_IN_SIGNATURE)


class _Guarded:
    """A compiled function; no Python function, which would bind as a method does."""

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        self._function = function
        self._path = path

    def __call__(self, *args: Any, **options: Any) -> Any:
        if any(tensor.is_cuda for tensor in tensors_in((args, options))):
            _refuse(self._path, "a function of a compiled extension")
        return self._function(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


EXTENSIONS = Extensions()
