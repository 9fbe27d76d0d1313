"""Libraries loaded by ctypes whose kernels need a driver: their functions are refused by name."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from pathlib import Path

import pytest

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnsupportedOperatorError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds a library as Linux does")


def mathematics(path: Path, *, needs: bytes) -> Path:
    """Return a copy of libm that contains the name ``needs`` of a library."""
    ctypes.CDLL(ctypes.util.find_library("m"))
    mapped = Path("/proc/self/maps").read_text().split()
    original = next(one for one in mapped if Path(one).name.startswith("libm.so"))
    path.write_bytes(Path(original).read_bytes() + needs)  # bytes behind the sections are not read
    return path


def test_functions_of_a_library_with_kernels_are_refused_by_name(tmp_path: Path) -> None:
    path = mathematics(tmp_path / "libkernels.so", needs=b"libcudart.so.13")
    with simulate("T4"):
        library = ctypes.CDLL(str(path))
        library.fabs.restype = ctypes.c_double
        with pytest.raises(
            UnsupportedOperatorError, match=r"^fabs of libkernels\.so, called at .*:\d+, is native"
        ):
            library.fabs(ctypes.c_double(-2.0))
    # It is the library's own again, and refused in the next simulation.
    assert library.fabs(ctypes.c_double(-2.0)) == 2.0
    with simulate("A100-40GB"), pytest.raises(UnsupportedOperatorError):
        library["fabs"](ctypes.c_double(-2.0))


def test_other_libraries_are_called(tmp_path: Path) -> None:
    path = mathematics(tmp_path / "libother.so", needs=b"")
    with simulate("T4"):
        library = ctypes.CDLL(str(path))
        library.fabs.restype = ctypes.c_double
        assert library.fabs(ctypes.c_double(-2.0)) == 2.0
        assert ctypes.CDLL(None).abs(-3) == 3
