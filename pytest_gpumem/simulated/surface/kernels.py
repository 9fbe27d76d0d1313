"""Functions of compiled extensions, whose kernels the simulation cannot see.

A description (``operators.custom_kernels``) runs in their place; without one the test is
skipped with a sentence that names them.

Extensions that are compiled while a test runs: refused where CUDA's compiler is missing.

``load()`` and ``load_inline()`` both end in ``_jit_compile()``, which writes ninja's file and
starts it; ``CUDAExtension()`` needs the libraries below CUDA_HOME (torch/utils/cpp_extension.py,
2.6 to 2.15).
"""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from pytest_gpumem.simulated.common.callsite import callers_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.operators.custom_kernels import OR_DRY, tensors_in
from pytest_gpumem.values.errors import UndescribedKernelError, UnsupportedOperatorError

_TENSOR_IN_SIGNATURE = ("torch.Tensor", "at::Tensor")
"""Spellings of a tensor argument in the signature that pybind11 puts first in a docstring
(torch/csrc/utils/pybind.h, PYBIND11_TYPE_CASTER of at::Tensor)."""

_WITHOUT_KERNELS = sys.stdlib_module_names | {"torch", "numpy", "sympy", "pytest_gpumem", "_pytest"}
"""Packages without such kernels, which hold half of all modules."""


class Extensions:
    """Functions of compiled extensions that accept tensors; on a simulated GPU they would crash."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._newest: tuple[int, str] = (0, "")
        """The number of modules, and the name of the last one: an import changes them."""
        self._found: list[tuple[Any, str, _Guarded]] = []
        self._open: ExitStack | None = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse tensors of a simulated GPU inside, in the extensions imported so far."""
        self._look_for_new()
        with ExitStack() as opened:
            _replace(self._found, opened)
            self._open = opened
            try:
                yield
            finally:
                self._open = None

    def compiled(self, module: Any, path: str) -> None:
        """Refuse them in ``module`` too, which the function of this ``path`` has compiled."""
        found = _guards(module, module.__name__, path)
        self._found += found
        if self._open is not None:
            _replace(found, self._open)

    def _look_for_new(self) -> None:
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
            if isinstance(loader, ExtensionFileLoader):
                self._found += _guards(module, name)


def _guards(
    module: Any, name: str, described_as: str | None = None
) -> list[tuple[Any, str, _Guarded]]:
    return [
        (module, attribute, _Guarded(value, f"{name}.{attribute}", described_as))
        for attribute, value in vars(module).items()
        if _takes_tensors(value)
    ]


def _replace(found: Iterable[tuple[Any, str, _Guarded]], until: ExitStack) -> None:
    patches = Patches()
    for guarded in found:
        patches.add(*guarded)
    until.enter_context(patches.applied())


def _takes_tensors(value: Any) -> bool:
    if isinstance(value, (type, FunctionType)) or not callable(value):
        return False
    signature = getattr(value, "__doc__", None)
    return isinstance(signature, str) and any(kind in signature for kind in _TENSOR_IN_SIGNATURE)


class _Guarded:
    """A compiled function; no Python function, which would be bound to an instance as a method."""

    def __init__(
        self, function: Callable[..., Any], path: str, described_as: str | None = None
    ) -> None:
        self._function = function
        self._path = path
        self._described_as = described_as or path

    def __call__(self, *args: Any, **options: Any) -> Any:
        if any(tensor.is_cuda for tensor in tensors_in((args, options))):
            raise UndescribedKernelError(
                f"{self._path} at {callers_line()} is a function of a compiled extension, which a "
                f"simulated GPU cannot run: say what it allocates with "
                f'pytest_gpumem.simulate_operator("{self._described_as}"), {OR_DRY}',
                self._path,
            )
        return self._function(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


EXTENSIONS = Extensions()


COMPILES = "torch.utils.cpp_extension"
"""A module that few tests import, as that takes long."""
_LOADERS = ("load", "load_inline")
_HAS_CUDA = torch.version.cuda is not None
"""Whether the torch that runs, and not the simulated release, is built with CUDA."""


def plan_compiling(patches: Patches, module: Any) -> None:
    """Plan refusals in ``torch.utils.cpp_extension``, once that is imported."""
    signature = inspect.signature(module._jit_compile)

    def can_compile() -> bool:
        return _HAS_CUDA and module.CUDA_HOME is not None

    def jit_compile(compile: Callable[..., Any], *args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        name, sources, with_cuda = given["name"], given["sources"], given["with_cuda"]
        caller = sys._getframe(2).f_code.co_name
        loader = caller if caller in _LOADERS else _LOADERS[0]
        if with_cuda is None:
            with_cuda = any(map(module._is_cuda_file, sources))
        if with_cuda and not can_compile():
            call = f'{loader}(name="{name}", ...)'
            raise UndescribedKernelError(
                f"{call} at {callers_line()} compiles for CUDA, whose compiler is not here: "
                "say what the functions of the module allocate with "
                f'pytest_gpumem.simulate_operator("{COMPILES}.{loader}")',
                call,
            )
        made = compile(*args, **options)
        if inspect.ismodule(made):
            EXTENSIONS.compiled(made, f"{COMPILES}.{loader}")
        return made

    def join_cuda_home(join: Callable[..., Any], *paths: Any) -> Any:
        if not can_compile():
            raise UnsupportedOperatorError(
                f"{COMPILES} at {callers_line()} asks for CUDA's compiler, which is not here: "
                "build the extension elsewhere, or say what its functions allocate with "
                'pytest_gpumem.simulate_operator("module.function")'
            )
        return join(*paths)

    patches.wrap(module, "_jit_compile", jit_compile)
    patches.wrap(module, "_join_cuda_home", join_cuda_home)


_NEEDS = (b"libcudart.so", b"libcuda.so", b"libcublas.so", b"cudart64_", b"nvcuda.dll")
"""Names of libraries: every library with CUDA kernels contains one of them."""
_OTHERS = frozenset({"torch", "triton", "nvidia"})
"""Packages whose libraries are loaded only to ask for their version and the like."""


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Refuse calls of functions in libraries with CUDA kernels that ctypes loads inside.

    Their kernels look for a driver: bitsandbytes's own library calls ``exit(1)`` where CUDA answers
    with an error (csrc/pythonInterface.cpp, csrc/ops.cuh: CUDA_CHECK_RETURN).
    """
    patches.wrap(ctypes.CDLL, "__init__", _load)


def _load(load: Callable[..., None], library: Any, name: Any, *args: Any, **options: Any) -> None:
    load(library, name, *args, **options)
    if name is not None and _has_kernels(os.fspath(name)):
        library._FuncPtr = _refusing_class(library._FuncPtr, Path(os.fsdecode(name)).name)


@cache
def _has_kernels(name: str) -> bool:
    path = Path(os.fsdecode(name))
    if _OTHERS & set(path.parts):
        return False
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(data.find(needed) >= 0 for needed in _NEEDS)
    except (OSError, ValueError):  # a name that the loader looks for, or an empty file
        return False


def _refusing_class(kind: Any, library: str) -> Any:
    """Return ``kind``, the class of a library's functions, so that it refuses calls."""

    class Refusing(kind):  # type: ignore[misc]  # each library has a class of its own
        _flags_ = kind._flags_
        _restype_ = kind._restype_

        def __call__(self, *args: Any) -> Any:
            name = getattr(self, "__name__", "a function")
            # Inside a simulation, of any kind: a library outlives the one that loaded it.
            simulated = hasattr(ctypes.CDLL.__init__, "__wrapped__")
            if not simulated or "cpu" in name.lower():
                return super().__call__(*args)
            raise UnsupportedOperatorError(
                f"{name} of {library}, called at {callers_line()}, is native code that needs a GPU "
                f"and could end the process without one"
            )

    return Refusing
