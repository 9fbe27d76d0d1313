"""Products of quantized matrices: calls that CUDA refuses, and allocations besides the result.

Source: aten/src/ATen/native/cuda/Blas.cpp (2.6 to 2.9) and ScaledBlas.cpp (since 2.10):
_scaled_mm_out_cuda, _scaled_mm_cuda_v2_out, _scaled_rowwise_rowwise, _scaled_gemm; Blas.cpp
(_int_mm_out_cuda); int8mm.cu (_weight_int8pack_mm_cuda). Torch's kernels for ``meta`` check less,
or have other messages; the messages here are those of 2.15 on the dry device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Rule, Scratch

_NAMES = {
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.uint8: "Byte",
}
"""Types as C++ names them."""
_ROWWISE = 1
"""ScalingType::RowWise (ATen/BlasBackend.h)."""
_CUBLAS_SCALES_ROWS_SINCE = (2, 11)
"""First release whose wheels have cuBLAS 12.9 or later (those for CUDA 13)."""


def refuse(gpu: GPU, operator: str, capabilities: str) -> None:
    """Raise the error of a GPU whose compute capability has no kernel for ``operator``."""
    raise (ValueError if gpu.version >= (2, 10) else RuntimeError)(
        f"torch.{operator} is only supported on CUDA devices with compute capability "
        f"{capabilities}, or ROCm MI300+"
    )


def _refuse_scaled(
    error: type[Exception],
    gpu: GPU,
    self: Tensor,
    mat2: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    capability = gpu.model.compute_capability
    if capability < (8, 9):
        refuse(gpu, "_scaled_mm", ">= 9.0 or 8.9")
    if not self.dim() == mat2.dim() == 2:
        raise error(f"both matrices have two dims, got {self.dim()} and {mat2.dim()}")
    for fault in _faults_of_scaled(self, mat2, bias, out_dtype or self.dtype):
        raise error(fault)
    if self.dtype is mat2.dtype is torch.float8_e5m2:
        raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")
    is_read = capability >= (10, 0) or not (self.numel() and mat2.numel())
    if not is_read and (self.stride(1) != 1 or mat2.stride(0) != 1):
        raise RuntimeError(
            "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"
        )


def _misfit(mat1: Tensor, mat2: Tensor) -> Iterator[str]:
    (rows, inner), (outer, columns) = mat1.shape, mat2.shape
    if inner != outer:
        yield f"mat1 and mat2 shapes cannot be multiplied ({rows}x{inner} and {outer}x{columns})"


def _faults_of_scaled(
    mat1: Tensor, mat2: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Iterator[str]:
    (rows, inner), (outer, columns) = mat1.shape, mat2.shape
    yield from _misfit(mat1, mat2)
    if mat1.itemsize > 1 or mat2.itemsize > 1:
        yield "Expected both inputs to be fp8 or fp4 types"
    if bias is not None and bias.numel() != columns:
        yield f"Bias must be size {columns} but got {bias.numel()}"
    if inner % 16:
        yield (
            "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: "
            f"({rows}x{inner})."
        )
    if outer % 16 or columns % 16:
        yield f"mat2 shape ({outer}x{columns}) must be divisible by 16"
    if bias is None:
        return
    made, given = (_NAMES.get(dtype, str(dtype)) for dtype in (out_dtype, bias.dtype))
    if out_dtype is torch.float32:
        yield "Bias is not supported when out_dtype is set to Float32"
    if given not in ("BFloat16", "Half"):
        yield f"Bias must be BFloat16 or Half, but got {given}"
    for dtype, word in ((torch.bfloat16, "BFloat16"), (torch.float16, "Float16")):
        if out_dtype is dtype is not bias.dtype:
            yield f"Bias must be {word} to compute {made} output, but got {given}"


def _scaled(gpu: GPU, result: Tensor, self: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    by_row = scale_a.dtype is torch.float32 and (scale_a.numel() > 1 or scale_b.numel() > 1)
    is_row = scale_a.numel() == self.shape[0] and scale_b.numel() == result.shape[1]
    _multiply(gpu, result, self, by_row=by_row and is_row)


def _scaled_v2(gpu: GPU, result: Tensor, self: Tensor, recipe_a: Sequence[int]) -> None:
    # Two scales of a matrix: those of whole matrices are multiplied before.
    with Scratch(gpu, *[4] * (len(recipe_a) - 1)):
        _multiply(gpu, result, self, by_row=list(recipe_a) == [_ROWWISE])


def _multiply(gpu: GPU, result: Tensor, mat1: Tensor, *, by_row: bool = False) -> None:
    """Call cuBLASLt, or CUTLASS where that has no kernel for scales of rows."""
    if not result.numel() or not mat1.numel():
        return
    capability = gpu.model.compute_capability
    if not by_row or (capability[0] == 9 and gpu.version >= _CUBLAS_SCALES_ROWS_SINCE):
        gpu.workspaces.gemm_lt(gpu.stream)
    elif capability < (9, 0):
        # What one block keeps of a tile that several share; how many share depends on occupancy.
        rows = min(128, max(16, 1 << (mat1.shape[0] - 1).bit_length()))
        partial = rows * 256 * 4 + 128
        Scratch(gpu).estimate(partial, "CUTLASS", "a product with scales of rows")


def _int_mm(self: Tensor, mat2: Tensor, out: Tensor | None = None) -> None:
    for fault in _faults_of_integers(self, mat2, out):
        raise RuntimeError(fault)


def _faults_of_integers(self: Tensor, mat2: Tensor, out: Tensor | None) -> Iterator[str]:
    if not self.dim() == mat2.dim() == 2:
        return  # the kernel for meta raises an error
    (rows, inner), columns = self.shape, mat2.shape[1]
    yield from _misfit(self, mat2)
    if rows <= 16:
        yield f"self.size(0) needs to be greater than 16, but got {rows}"
    for name, number in (("self", inner), ("mat2", columns)):
        if number % 8 or not number:
            yield f"{name}.size(1) needs to be greater than 0 and a multiple of 8, but got {number}"
    if out is not None:
        for dim, expected in enumerate((rows, columns)):
            if out.shape[dim] != expected:
                yield f"Expected result.size({dim}) to be {expected} but got {out.shape[dim]}"
        if not out.is_contiguous():
            yield "Expected result to be contiguous."
    for matrix in (self, mat2):
        if matrix.dtype is not torch.int8:
            name = _NAMES.get(matrix.dtype, str(matrix.dtype))
            yield f"expected scalar type Char but found {name}"


def _weight_int8pack_mm(gpu: GPU, self: Tensor, mat2: Tensor, scales: Tensor) -> Scratch:
    """Allocate for a product in float32: casts of what is read, and a result to be cast."""
    casts = Scratch(gpu)
    for read, dtype in ((self, torch.float32), (mat2, torch.int8), (scales, torch.float32)):
        if read.dtype is not dtype or not read.is_contiguous():
            casts.take(read.numel() * dtype.itemsize)
    if self.dtype is not torch.float32:
        casts.take(self.shape[0] * mat2.shape[0] * 4)
    return casts


RULES = {
    "_scaled_mm": Rule(before=partial(_refuse_scaled, RuntimeError), after=_scaled),
    "_scaled_mm_v2": Rule(before=partial(_refuse_scaled, ValueError), after=_scaled_v2),
    "_scaled_addmm": Rule(after=lambda gpu, result, mat1: _multiply(gpu, result, mat1)),
    "_int_mm": Rule(before=_int_mm),
    "_weight_int8pack_mm": Rule(before=_weight_int8pack_mm),
}
