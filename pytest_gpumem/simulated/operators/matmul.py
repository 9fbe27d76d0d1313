"""Matrix products: copies of operands that cuBLAS cannot read, and the library handle they take.

Source: aten/src/ATen/native/cuda/Blas.cpp (addmm_out_cuda_impl and its gemm_and_bias condition,
bmm_out_cuda_impl, prepare_batch_matrix_for_cublas), cuBlasCommonArgs.h (prepare_matrix_for_cublas),
CUDABlas.cpp (gemm, bgemm, gemv and dot take getCurrentCUDABlasHandle()), native/Linear.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import HALVES
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch

_LT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def _mm(gpu: GPU, self: Tensor, mat2: Tensor, result: Tensor) -> None:
    _product(gpu, self, mat2, result, by_lt=False)


def _addmm(gpu: GPU, self: Tensor, mat1: Tensor, mat2: Tensor, beta: float, result: Tensor) -> None:
    by_lt = _bias_in_epilogue(gpu, self, mat1, mat2, beta, result) or (
        gpu.version >= _SUMS_BY_LT_SINCE
        and result.dtype in HALVES
        and result is not self
        and beta != 0
        and self.shape == result.shape
        and self.stride(1) == 1
    )
    _product(gpu, mat1, mat2, result, by_lt=by_lt)


_SUMS_BY_LT_SINCE = (2, 14)
"""First release whose cuBLASLt adds a matrix of 16 bits to a product (tried on 2.13, 2.15)."""


def _product(gpu: GPU, mat1: Tensor, mat2: Tensor, result: Tensor, *, by_lt: bool) -> None:
    if result.numel() and mat1.numel():
        operands = (mat2, mat1) if result.is_contiguous() else (mat1, mat2)
        copied = [operand.nbytes for operand in operands if not _readable(operand)]
        _multiply(gpu, copied, by_lt=by_lt)


def _multiply(gpu: GPU, copied: Sequence[int], *, by_lt: bool = False) -> None:
    """Call the library while copies of operands exist."""
    copies = Scratch(gpu, *copied) if copied else None
    if by_lt:
        gpu.workspaces.gemm_lt(gpu.stream)
    else:
        gpu.workspaces.gemm(gpu.stream)
    if copies is not None:
        copies.free()


def _each_batch(gpu: GPU, batch1: Tensor, batch2: Tensor, result: Tensor) -> None:
    """addbmm_impl_ (native/LinearAlgebra.cpp): ``addmm_`` of one batch after the other."""
    for _ in range(batch1.shape[0] if result.numel() and batch1.numel() else 0):
        gpu.workspaces.gemm(gpu.stream)


def _readable(matrix: Tensor) -> bool:
    rows, columns = matrix.shape
    down, across = matrix.stride()
    return (
        (across == 1 and down >= max(1, columns))
        or (down == 1 and across >= max(1, rows))
        or matrix.is_contiguous()
        or matrix.t().is_contiguous()
    )


def _bmm(gpu: GPU, self: Tensor, mat2: Tensor, result: Tensor) -> None:
    is_outer_product = (
        gpu.version >= _OUTER_PRODUCT_SINCE
        and self.shape[2] == 1
        and self.numel() > 0
        and mat2.numel() > 0
        and not self.is_complex()
    )
    if not is_outer_product:
        _batched(gpu, self, mat2, result)


_OUTER_PRODUCT_SINCE = (2, 12)
"""Since this release ``bmm`` with one element a row is a Triton kernel (torch/_native/ops/
bmm_outer_product/triton_impl.py), which takes no workspace."""


def _batched(gpu: GPU, batch1: Tensor, batch2: Tensor, result: Tensor) -> None:
    if not result.numel() or not batch1.numel():
        return
    _, down, across = result.stride()
    _, rows, columns = result.shape
    plain = down == 1 and (columns == 1 or across >= max(1, rows))
    # cuBLAS is column-major: a row-major result is computed transposed.
    fast, leading = (1, 2) if plain else (2, 1)
    first, second = (batch1, batch2) if plain else (batch2, batch1)
    m, n, k = result.shape[fast], result.shape[leading], first.shape[leading]
    read = (first, m, k), (second, k, n)
    copied = [each[0].nbytes for each in read if not _batch_readable(fast, leading, *each)]
    _multiply(gpu, copied)


def _batch_readable(fast: int, leading: int, matrix: Tensor, along: int, other: int) -> bool:
    strides = matrix.stride()
    return (
        (strides[fast] == 1 and strides[leading] >= max(1, along))
        or (strides[leading] == 1 and strides[fast] >= max(1, other))
        or (matrix.is_contiguous() and strides[1] != 0 and strides[2] != 0)
    )


def _bias_in_epilogue(
    gpu: GPU, bias: Tensor, mat1: Tensor, mat2: Tensor, beta: float, result: Tensor
) -> bool:
    one_row_excluded = (2, 10) <= gpu.version < (2, 12)
    return (
        beta == 1
        and result.dtype in _LT_DTYPES
        and bias.is_contiguous()
        and (bias.dim() == 1 or (gpu.version >= (2, 10) and bias.squeeze().dim() == 1))
        and bias.numel() == mat2.shape[1]
        and mat2.shape[0] > 1
        and mat2.shape[1] > 1
        and (not one_row_excluded or min(mat1.shape) > 1)
    )


def _mv(gpu: GPU, vec: Tensor, result: Tensor) -> None:
    """addmv_out_cuda: gemv reads no vector whose elements are one number."""
    if result.numel() and vec.numel():
        _multiply(gpu, [] if vec.stride(0) else [vec.nbytes])


def _dot(gpu: GPU, self: Tensor) -> None:
    if self.numel():
        gpu.workspaces.gemm(gpu.stream)


RULES = {
    "mm": Rule(after=_mm),
    "bmm": Rule(after=_bmm),
    "baddbmm baddbmm_": Rule(after=_batched),
    "addbmm addbmm_": Rule(after=_each_batch),
    "mv addmv addmv_": Rule(after=_mv),
    "addmm addmm_ _addmm_activation": Rule(after=_addmm),
    "dot vdot": Rule(after=_dot),
}


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``aten::linear`` as CUDA takes it apart: the bias is added in place where it is added."""
    if bias is None or input.dim() <= 2 or input.is_contiguous():
        return _decomposed(input, weight, bias)  # type: ignore[no-any-return]  # an operator
    return torch.matmul(input, weight.t()).add_(bias)


_decomposed = torch.ops.aten.linear.default.decompose

COMPOSITES: dict[str, Composite] = {"aten.linear.default": linear}
