"""Libraries that Python loads by ctypes: their kernels look for a driver, and may end the process.

bitsandbytes calls functions of its own library for paged memory, which call ``exit(1)`` where CUDA
answers with an error (csrc/pythonInterface.cpp, csrc/ops.cuh: CUDA_CHECK_RETURN).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gpumem.simulated.common.callsite import callers_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.values.errors import UnsupportedOperatorError

_NEEDS = (b"libcudart.so", b"libcuda.so", b"libcublas.so", b"cudart64_", b"nvcuda.dll")
"""Names of libraries, one of which is in each library with kernels of CUDA's."""
_OTHERS = frozenset({"torch", "triton", "nvidia"})
"""Packages whose libraries are loaded for information about themselves."""


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Refuse to call functions of libraries with CUDA's kernels that are loaded inside."""
    patches.add(ctypes.CDLL, "__init__", _loading(ctypes.CDLL.__init__))


def _is_simulated() -> bool:
    """Return whether any simulation is active: a library outlives the one that loaded it."""
    return ctypes.CDLL.__init__.__module__ == __name__


def _loading(load: Callable[..., None]) -> Callable[..., None]:
    def call(library: Any, name: Any, *args: Any, **options: Any) -> None:
        load(library, name, *args, **options)
        if name is not None and _has_kernels(os.fspath(name)):
            library._FuncPtr = _refusing(library._FuncPtr, Path(os.fsdecode(name)).name)

    return call


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


def _refusing(kind: Any, library: str) -> Any:
    """``kind``, the class of a library's functions, that refuses calls inside a simulation."""

    class Refusing(kind):  # type: ignore[misc]  # each library has a class of its own
        _flags_ = kind._flags_
        _restype_ = kind._restype_

        def __call__(self, *args: Any) -> Any:
            name = getattr(self, "__name__", "a function")
            if not _is_simulated() or "cpu" in name.lower():
                return super().__call__(*args)
            raise UnsupportedOperatorError(
                f"{name} of {library}, called at {callers_line()}, is native code that needs a GPU "
                f"and could end the process without one"
            )

    return Refusing
