"""Products of groups of matrices, and of scaled ones: mixtures of experts, 8-bit floats.

Source: aten/src/ATen/native/cuda/Blas.cpp (2.6 to 2.9) and GroupedBlas.cpp, ScaledBlas.cpp (since
2.10): _grouped_mm_cuda, _scaled_grouped_mm_cuda, _scaled_mm_out_cuda, _scaled_mm_allowed_device;
native/GroupedMMUtils.h (_grouped_mm_validate_inputs, create_grouped_gemm_output_tensor,
_grouped_mm_fallback); native/cuda/GroupMM.cu (bf16bf16_grouped_gemm_impl_sm90_sm100). Torch 2.8 has
the fast kernel alone, for compute capability 9; since 2.9 there is one for 10 too, and everything
else is multiplied group by group by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_gpumem.simulated.common.raw import META
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Rule, Scratch

_empty_strided = torch.empty_strided
_DTYPES = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
_IN_CPP = {torch.float32: "float", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}
_ALIGNMENT = 16
"""Bytes to which the kernel's copies align rows."""
_DESCRIPTOR = 128
"""Bytes of a tensor map, by which the copying unit finds a matrix."""


def _check(condition: bool, sentence: str) -> None:
    if not condition:
        raise RuntimeError(sentence)


def _shapes(
    gpu: GPU,
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    a, b = self, mat2
    _validate(gpu, a, b, offs)
    _check(bias is None, "Bias not supported yet")
    _check(out_dtype in (None, a.dtype), "Grouped gemm output dtype must match `mat_a` dtype")
    # Group by group it is a product of two matrices (Blas.cpp, addmm_out_cuda_impl).
    _check(
        a.dtype is b.dtype,
        "expected mat1 and mat2 to have the same dtype, but got: "
        f"{_IN_CPP[a.dtype]} != {_IN_CPP[b.dtype]}",
    )
    size: Sequence[int]
    if offs is None:
        _check(a.shape[0] == b.shape[0], "batched dimension has to match")
        size = (a.shape[0], a.shape[1], b.shape[-1])
    elif a.dim() == b.dim() == 2:
        size = (offs.shape[0], a.shape[0], b.shape[1])
    else:
        stacked = b if a.dim() == 2 else a
        _check(offs.shape[0] == stacked.shape[0], "matrix batch sizes have to match")
        size = (a.shape[-2], b.shape[-1])
    dtype = out_dtype or a.dtype
    step = _ALIGNMENT // dtype.itemsize
    row = -(-size[-1] // step) * step
    stride = (row, 1) if len(size) == 2 else (size[1] * row, row, 1)
    return _empty_strided(size, stride, dtype=dtype, device=META)


def _validate(gpu: GPU, a: Tensor, b: Tensor, offs: Tensor | None) -> None:
    if gpu.version < (2, 9):
        _check(
            gpu.model.compute_capability[0] == 9,
            "torch._grouped_mm is only supported on CUDA devices with compute capability = 9.0",
        )
    for name, matrix in (("mat_a", a), ("mat_b", b)):
        allowed = _DTYPES if gpu.version >= (2, 9) else {torch.bfloat16}
        expected = "Float32, BFloat16 or Float16" if gpu.version >= (2, 9) else "BFloat16"
        found = _DTYPES.get(matrix.dtype, str(matrix.dtype).removeprefix("torch."))
        _check(matrix.dtype in allowed, f"Expected {name} to be {expected} matrix, got {found}")
    for name, matrix in (("mat_a", a), ("mat_b", b)):
        _check(matrix.dim() in (2, 3), f"{name} has to be 2 or 3d")
    _check(
        a.dim() == b.dim() == 2 or a.shape[-1] == b.shape[-2],
        "contraction dimension of mat_a and mat_b must match",
    )
    for matrix in (a, b):
        _check_strides(matrix)
    _check(
        (offs is not None) == (2 in (a.dim(), b.dim())),
        "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d",
    )
    if offs is not None:
        _check(offs.dim() == 1, "offs has to be 1D")
        _check(offs.dtype is torch.int32, "Offsets have to be int32")


def _check_strides(matrix: Tensor) -> None:
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    if down == 1 and across >= max(1, rows):
        leading = across
    elif across == 1 and down >= max(1, columns):
        leading = down
    else:
        raise RuntimeError(
            f"Invalid strides/sizes, got {list(matrix.stride())} for strides and "
            f"{list(matrix.shape)} for sizes"
        )
    _check(
        leading * matrix.element_size() % _ALIGNMENT == 0, "strides should be multiple of 16 bytes"
    )


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
        gpu.simulation.streams.host_waits(gpu.index)
    if result.numel() and self.numel():
        gpu.workspaces.gemm(gpu.stream)


def _fast(gpu: GPU, self: Tensor, mat2: Tensor, offs: Tensor | None) -> None:
    """One kernel of CUTLASS: pointers, strides and sizes of all groups; then a map of each matrix
    by SM."""
    if self.dim() == mat2.dim() == 2:
        groups = 0 if offs is None else offs.shape[0]
    else:
        groups = (mat2 if self.dim() == 2 else self).shape[0]
    pointers = (groups + 1) // 2 * 2 * 3 * 8
    maps = 4 * _DESCRIPTOR * gpu.model.sm_count
    arguments = Scratch(gpu, pointers + groups * 3 * 4 + groups * 3 * 8)
    arguments.estimate(maps, "CUTLASS", "a grouped product")


def _scaled_grouped_device(gpu: GPU) -> None:
    major = gpu.model.compute_capability[0]
    if major == 9 or (major == 10 and gpu.version >= (2, 9)):
        return
    allowed = "[9.0, 10.0]" if gpu.version >= (2, 9) else "9.0"
    raise _refusal(gpu)(
        "torch._scaled_grouped_mm is only supported on CUDA devices with compute capability = "
        f"{allowed}, or ROCm MI300+"
    )


def _scaled_device(gpu: GPU) -> None:
    if gpu.model.compute_capability >= (8, 9):
        return
    raise _refusal(gpu)(
        "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, "
        "or ROCm MI300+"
    )


def _refusal(gpu: GPU) -> type[Exception]:
    return ValueError if gpu.version >= (2, 10) else RuntimeError


def _scaled(gpu: GPU, result: Tensor) -> None:
    if result.numel():
        gpu.workspaces.gemm_lt(gpu.stream)


RULES = {
    "_grouped_mm": Rule(shapes=_shapes, after=_grouped),
    "_scaled_grouped_mm": Rule(before=_scaled_grouped_device, after=_fast),
    "_scaled_mm": Rule(before=_scaled_device, after=_scaled),
}
