"""Linear algebra and Fourier transforms: the known part of their libraries' calls.

cuFFT's and cuSOLVER's workspaces are sized by the libraries; they are left out, with a note of the
simulation. Source: aten/src/ATen/native/cuda/SpectralOps.cpp (_fft_c2r_cufft,
_fft_c2c_cufft), linalg/BatchLinearAlgebra.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Rule, passing

_DIMS_AT_ONCE = 3
"""Dimensions that cuFFT transforms in one call."""


def _is_one_call(dims: Sequence[int]) -> bool:
    """use_optimized_cufft_path."""
    return len(dims) <= _DIMS_AT_ONCE and tuple(dims[:2]) != (0, 1)


def leave_out(gpu: GPU, library: str, operator: str) -> None:
    """Note that the workspace of ``library`` is in no number."""
    gpu.simulation.note(left_out_note(library, operator))


def left_out_note(library: str, operator: str) -> str:
    """Return a note that the library's workspace is left out."""
    return (
        f"{library}'s workspace for {operator} is not known and left out: "
        f"the peak can be higher on a GPU"
    )


def _complex(gpu: GPU, dim: Sequence[int], result: Tensor) -> None:
    leave_out(gpu, "cuFFT", "fft")
    if len(dim) > _DIMS_AT_ONCE:
        # The calls go to and fro between two results.
        passing(gpu, result.nbytes)


def _to_complex(gpu: GPU, dim: Sequence[int], result: Tensor) -> None:
    leave_out(gpu, "cuFFT", "rfft")
    if not _is_one_call(dim) and len(dim) > 1:
        passing(gpu, result.nbytes)


def _to_real(gpu: GPU, self: Tensor) -> None:
    # The library overwrites its input.
    leave_out(gpu, "cuFFT", "irfft")
    passing(gpu, self.nbytes)


def _solved_by_library(operator: str) -> Rule:
    return Rule(after=lambda gpu: leave_out(gpu, "cuSOLVER", operator))


_SOLVERS = (
    "linalg_eig _linalg_eigvals linalg_lu linalg_lstsq _linalg_slogdet geqrf "
    "linalg_householder_product ormqr linalg_ldl_factor_ex"
).split()
"""Operators of which nothing but their library is known; others are in ``solvers``."""

RULES = {
    "aten::_fft_c2c": Rule(after=_complex),
    "aten::_fft_r2c": Rule(after=_to_complex),
    "aten::_fft_c2r": Rule(after=_to_real),
    **{f"aten::{name}": _solved_by_library(name.lstrip("_")) for name in _SOLVERS},
}
