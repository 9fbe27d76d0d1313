"""Matrix products: copies of operands that cuBLAS cannot read, and workspaces of library handles.

Source: aten/src/ATen/native/cuda/Blas.cpp (addmm_out_cuda_impl and its gemm_and_bias condition,
bmm_out_cuda_impl, prepare_batch_matrix_for_cublas), cuBlasCommonArgs.h (prepare_matrix_for_cublas),
CUDABlas.cpp (gemm, bgemm, gemv and dot take getCurrentCUDABlasHandle()), native/Linear.cpp.

Products of groups of matrices (mixtures of experts): Blas.cpp (2.6 to 2.9) and GroupedBlas.cpp
(since 2.10): _grouped_mm_cuda, _scaled_grouped_mm_cuda;
native/GroupedMMUtils.h (create_grouped_gemm_output_tensor, _grouped_mm_fallback);
native/cuda/GroupMM.cu (bf16bf16_grouped_gemm_impl_sm90_sm100), ScaledGroupMM.cu. Torch 2.8 has the
fast kernel only, for compute capability 9; since 2.9 there is one for 10 too, and everything else
is multiplied group by group by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.common.raw import META
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import HALF_DTYPES, is_dense
from pytest_gpumem.simulated.operators.quantized import refuse
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, with_in_place

_aten = torch.ops.aten
_LT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def _addmm(gpu: GPU, self: Tensor, mat1: Tensor, mat2: Tensor, beta: float, result: Tensor) -> None:
    by_lt = _bias_in_epilogue(gpu, self, mat1, mat2, beta, result) or (
        gpu.version >= _SUMS_BY_LT_SINCE
        and result.dtype in HALF_DTYPES
        and result is not self
        and beta != 0
        and self.shape == result.shape
        and min(*mat1.shape, *mat2.shape) > 1
        and _in_rows(self)
        and _in_rows(result)
    )
    _product(gpu, mat1, mat2, result, by_lt=by_lt)


_SUMS_BY_LT_SINCE = (2, 14)
"""First release whose cuBLASLt adds a matrix of 16 bits to a product (tried on 2.13, 2.15)."""


def _in_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def _addmm_activation(
    gpu: GPU, self: Tensor, mat1: Tensor, mat2: Tensor, beta: float, result: Tensor
) -> None:
    by_lt = _bias_in_epilogue(gpu, self, mat1, mat2, beta, result, activates=True)
    _product(gpu, mat1, mat2, result, by_lt=by_lt)


def _product(gpu: GPU, self: Tensor, mat2: Tensor, result: Tensor, *, by_lt: bool = False) -> None:
    if result.numel() and self.numel():
        is_transposed = result.is_contiguous()
        operands = (mat2, self) if is_transposed else (self, mat2)
        copied = [each.nbytes for each in operands if not _readable(each, is_transposed)]
        _multiply(gpu, copied, by_lt=by_lt)


def _multiply(gpu: GPU, copied: Sequence[int], *, by_lt: bool = False) -> None:
    """Call the library while copies of operands exist."""
    with Scratch(gpu, *copied):
        if by_lt:
            gpu.workspaces.gemm_lt(gpu.stream)
        else:
            gpu.workspaces.gemm(gpu.stream)


def _readable(matrix: Tensor, result_is_transposed: bool) -> bool:
    """Return whether prepare_matrix_for_cublas copies nothing; a conjugate has to be transposed."""
    rows, columns = matrix.shape
    down, across = matrix.stride()
    is_row_major = across == 1 and down >= max(1, columns)
    is_column_major = down == 1 and across >= max(1, rows)
    if is_dense(matrix):
        is_transposed = matrix.is_contiguous()
    elif is_row_major or is_column_major:
        is_transposed = not is_column_major
    else:
        return False
    return not (matrix.is_conj() and is_transposed == result_is_transposed)


def _bmm(gpu: GPU, self: Tensor, mat2: Tensor, result: Tensor, out: Tensor | None = None) -> None:
    is_outer_product = (
        _HAS_TRITON
        and out is None
        and gpu.version >= _OUTER_PRODUCT_SINCE
        and self.shape[2] == 1
        and self.numel() > 0
        and mat2.numel() > 0
        and not self.is_complex()
    )
    if not is_outer_product:
        _batched(gpu, self, mat2, result)


_OUTER_PRODUCT_SINCE = (2, 12)
"""Since this release ``bmm`` with one element a row is a Triton kernel (torch/_native/ops/
bmm_outer_product/triton_impl.py), which takes no workspace; ``bmm.out`` is not."""
_HAS_TRITON = torch.version.cuda is None or find_spec("triton") is not None
"""A CUDA build multiplies by cuBLAS if Triton is not installed; a CPU build stands for the wheel of
Linux, which installs it."""


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
    """Return whether prepare_batch_matrix_for_cublas copies nothing, as a transposed conjugate."""
    strides = matrix.stride()
    if strides[fast] == 1 and strides[leading] >= max(1, along):
        return not matrix.is_conj()
    if strides[leading] == 1 and strides[fast] >= max(1, other):
        return True
    is_read = matrix.is_contiguous() and strides[1] != 0 and strides[2] != 0
    return is_read and not (matrix.is_conj() and fast == 2)


def _bias_in_epilogue(
    gpu: GPU,
    bias: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    beta: float,
    result: Tensor,
    *,
    activates: bool = False,
) -> bool:
    """Return isInputCompliesAddmmCudaLt, before 2.10 that of addmm_out_cuda_impl (Blas.cpp).

    The CUDA wheels of 2.6 to 2.15 decide alike on the dry device, and an H100 with 2.11.
    """
    version = gpu.version
    is_row = bias.dim() == 1 or (version >= (2, 10) and bias.squeeze().dim() == 1)
    fuses = is_row and bias.is_contiguous() and bias.shape[-1] == mat2.shape[1]
    fuses |= version >= (2, 10) and activates and bias.dim() == 2
    return (
        fuses
        and beta == 1
        and result.dtype in _LT_DTYPES
        and result.is_contiguous()
        and min(mat2.shape) > 1
        and (version != (2, 10) or mat1.shape[0] > 1)
    )


def _mv(gpu: GPU, self: Tensor, vec: Tensor, result: Tensor, mat: Tensor | None = None) -> None:
    """Allocate for addmv_out_cuda: gemv reads no vector of one number, no matrix with two gaps."""
    matrix = self if mat is None else mat
    if not result.numel() or not vec.numel():
        return
    copied = [] if vec.stride(0) else [vec.nbytes]
    if not (_in_rows(matrix) or _in_rows(matrix.t())):
        copied.append(matrix.numel() * matrix.itemsize)
    _multiply(gpu, copied)


_empty_strided = torch.empty_strided
_ALIGNMENT = 16
"""Bytes to which rows of a result are aligned."""
_DESCRIPTOR = 128
"""Bytes of a tensor map, by which the copying unit finds a matrix."""


def _shapes(
    gpu: GPU, self: Tensor, mat2: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """Return create_grouped_gemm_output_tensor, for arguments that CUDA accepts."""
    if gpu.version < (2, 9) and gpu.model.compute_capability[0] != 9:
        refuse(gpu, "_grouped_mm", "= 9.0")
    is_flat = self.dim() == mat2.dim() == 2
    if not is_flat and self.shape[-1] != mat2.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    size: Sequence[int] = (self.shape[-2], mat2.shape[-1])
    if self.dim() == mat2.dim():
        size = ((self if offs is None else offs).shape[0], *size)
    dtype = out_dtype or self.dtype
    step = _ALIGNMENT // dtype.itemsize
    row = -(-size[-1] // step) * step
    stride = (row, 1) if len(size) == 2 else (size[1] * row, row, 1)
    return _empty_strided(size, stride, dtype=dtype, device=META)


def _grouped(
    gpu: GPU,
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None,
    out_dtype: torch.dtype | None,
    result: Tensor,
) -> None:
    half = self.dtype is mat2.dtype is torch.bfloat16 and out_dtype in (None, torch.bfloat16)
    major = gpu.model.compute_capability[0]
    if half and (major == 9 or (major == 10 and gpu.version >= (2, 9))):
        _fast(gpu, self, mat2, offs)
        return
    if offs is not None:
        gpu.waits()
    if result.numel() and self.numel():
        gpu.workspaces.gemm(gpu.stream)


def _fast(gpu: GPU, self: Tensor, mat2: Tensor, offs: Tensor | None) -> None:
    groups = _groups(self, mat2, offs)
    by_sm = 4 * _DESCRIPTOR
    if gpu.model.compute_capability[0] == 10:
        rows = self.shape[-2] // (groups if self.dim() < mat2.dim() else 1)
        columns = mat2.shape[-1] // (groups if mat2.dim() < self.dim() else 1)
        by_sm = 5376 if min(rows, columns) <= 128 else 5888
    _by_cutlass(gpu, _arguments(groups, 3), by_sm)


def _scaled_fast(gpu: GPU, self: Tensor, mat2: Tensor, scale_a: Any, offs: Tensor | None) -> None:
    groups = _groups(self, mat2, offs)
    if (scale_a if isinstance(scale_a, Tensor) else scale_a[0]).dtype is torch.float32:
        _by_cutlass(gpu, _arguments(groups, 5), 4 * _DESCRIPTOR)
    else:
        _by_cutlass(gpu, sum(-(-each * groups // 16) * 16 for each in _OF_BLOCKS), 8704)


_OF_BLOCKS = (*[8] * 8, 16, 16, 12, 4, 4)
"""Bytes for each group, of arguments of a product with block scales (MSLK): pointers and strides,
layouts of scales, sizes and two numbers."""


def _arguments(groups: int, pointers: int) -> int:
    """Return the bytes of pointers to each group's matrices, three strides and sizes."""
    return (groups + 1) // 2 * 2 * pointers * 8 + groups * 3 * (4 + 8)


def _groups(self: Tensor, mat2: Tensor, offs: Tensor | None) -> int:
    if self.dim() == mat2.dim() == 2:
        return 0 if offs is None else offs.shape[0]
    return (mat2 if self.dim() == 2 else self).shape[0]


def _by_cutlass(gpu: GPU, arguments: int, by_sm: int) -> None:
    """Allocate per kernel and per SM as CUTLASS does on the dry device of an H100 and a B200."""
    taken = Scratch(gpu, arguments)
    taken.estimate(by_sm * gpu.model.sm_count, "CUTLASS", "a grouped product")


def _scaled_grouped_device(gpu: GPU) -> None:
    major = gpu.model.compute_capability[0]
    if not (major == 9 or (major == 10 and gpu.version >= (2, 9))):
        refuse(gpu, "_scaled_grouped_mm", "= [9.0, 10.0]" if gpu.version >= (2, 9) else "= 9.0")


ABOVE_AUTOGRAD: dict[str, Composite] = {
    "aten.linear.default": with_in_place(
        _aten.linear.default, {_aten.add.Tensor: _aten.add_.Tensor}
    )
}

RULES = {
    "mm": Rule(after=lambda gpu, self, mat2, result: _product(gpu, self, mat2, result)),
    "bmm": Rule(after=_bmm),
    "baddbmm baddbmm_": Rule(after=_batched),
    "mv addmv addmv_": Rule(after=_mv),
    "addmm addmm_": Rule(after=_addmm),
    "_addmm_activation": Rule(after=_addmm_activation),
    "dot vdot": Rule(after=lambda gpu: gpu.workspaces.gemm(gpu.stream)),
    "_grouped_mm": Rule(shapes=_shapes, after=_grouped),
    "_scaled_grouped_mm": Rule(before=_scaled_grouped_device, after=_scaled_fast),
    "_scaled_grouped_mm_v2": Rule(
        before=_scaled_grouped_device,
        shapes=lambda gpu, self, mat2, offs, out_dtype: _shapes(
            gpu, self, mat2, offs, out_dtype or torch.bfloat16
        ),
        after=_scaled_fast,
    ),
}
