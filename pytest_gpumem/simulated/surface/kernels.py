"""Functions of compiled extensions, whose kernels cannot be inspected.

A description (:mod:`pytest_gpumem.simulated.operators.described`) runs in their place; without one
the test is skipped with a sentence that names them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ExtensionFileLoader
from types import FunctionType
from typing import Any, NoReturn

from pytest_gpumem.simulated.common.callsite import callers_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.operators.described import OR_DRY, tensors_in
from pytest_gpumem.values.errors import UndescribedKernelError

_TENSOR_IN_SIGNATURE = ("torch.Tensor", "at::Tensor")
"""Spellings of a tensor argument in the signature that pybind11 puts first in a docstring
(torch/csrc/utils/pybind.h, PYBIND11_TYPE_CASTER of at::Tensor)."""

_WITHOUT_KERNELS = sys.stdlib_module_names | {"torch", "numpy", "sympy", "pytest_gpumem", "_pytest"}
"""Packages without such kernels, which hold half of all modules."""


class Extensions:
    """Functions of compiled extensions that take tensors; on a simulated GPU they would crash."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._newest: tuple[int, str] = (0, "")
        """The number of modules, and the last of them, which an import changes."""
        self._found: list[tuple[Any, str, _Guarded]] = []
        self._open: ExitStack | None = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep tensors of a simulated GPU from the extensions imported so far."""
        self._look()
        with ExitStack() as opened:
            _replace(self._found, opened)
            self._open = opened
            try:
                yield
            finally:
                self._open = None

    def compiled(self, module: Any, path: str) -> None:
        """Keep them from ``module`` too, which the function of this ``path`` has compiled."""
        found = [
            (module, attribute, _Guarded(value, f"{module.__name__}.{attribute}", path))
            for attribute, value in vars(module).items()
            if _takes_tensors(value)
        ]
        self._found += found
        if self._open is not None:
            _replace(found, self._open)

    def _look(self) -> None:
        newest = len(sys.modules), next(reversed(sys.modules))
        if newest == self._newest:
            return
        self._newest = newest
        seen = self._seen
        new = [name for name in sys.modules if name not in seen]
        seen.update(new)
        for name in new:
            if not isinstance(name, str) or name.partition(".")[0] in _WITHOUT_KERNELS:
                continue
            module = sys.modules[name]
            loader = getattr(getattr(module, "__spec__", None), "loader", None)
            if not isinstance(loader, ExtensionFileLoader):
                continue
            for attribute, value in vars(module).items():
                if _takes_tensors(value):
                    guard = _Guarded(value, f"{name}.{attribute}")
                    self._found.append((module, attribute, guard))


def _replace(found: Iterable[tuple[Any, str, _Guarded]], until: ExitStack) -> None:
    patches = Patches()
    for module, name, guard in found:
        patches.add(module, name, guard)
    patches.apply()
    until.callback(patches.undo)


def _takes_tensors(value: Any) -> bool:
    if isinstance(value, (type, FunctionType)) or not callable(value):
        return False
    signature = getattr(value, "__doc__", None)
    return isinstance(signature, str) and any(kind in signature for kind in _TENSOR_IN_SIGNATURE)


class _Guarded:
    """A compiled function; no Python function, which would bind as a method does."""

    def __init__(
        self, function: Callable[..., Any], path: str, described_as: str | None = None
    ) -> None:
        self._function = function
        self._path = path
        self._described_as = described_as or path

    def __call__(self, *args: Any, **options: Any) -> Any:
        if any(tensor.is_cuda for tensor in tensors_in((args, options))):
            self._refuse()
        return self._function(*args, **options)

    def _refuse(self) -> NoReturn:
        raise UndescribedKernelError(
            f"{self._path} at {callers_line()} is a function of a compiled extension, which a "
            f"simulated GPU cannot run: say what it allocates with "
            f'pytest_gpumem.simulate_operator("{self._described_as}"), {OR_DRY}',
            self._path,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


EXTENSIONS = Extensions()
