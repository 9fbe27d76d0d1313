"""bitsandbytes' weights of 4 and 8 bits: packed, and multiplied by, of what its Python code makes.

Source: bitsandbytes/backends/cuda/ops.py (quantize_blockwise, quantize_4bit, gemm_4bit,
_dequant_linear_fallback, _gemm_4bit_kernel_impl) of bitsandbytes 0.50.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Composite

_KERNELS = "bitsandbytes.backends.cuda.ops"
"""The module that registers the operator for GPUs."""


def _gemm_4bit(
    gpu: GPU,
    A: Tensor,  # noqa: N803 - the schema's names
    shapeB: Sequence[int],  # noqa: N803
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    if _has_kernel_for(A, shapeB, blocksize):
        rows = A.contiguous()
        offset = None if absmax_offset is None else absmax_offset.to(torch.float32)
        result = A.new_empty((*A.shape[:-1], shapeB[0]))
        del rows, offset
        return result
    scales = shifted = None
    if absmax_8bit is not None and absmax_offset is not None:
        scales = torch.empty_like(absmax_8bit, dtype=torch.float32)
        shifted = scales + absmax_offset
    result = functional.linear(A, A.new_empty(tuple(shapeB)), bias)
    del scales, shifted
    return result


def _has_kernel_for(rows: Tensor, shape: Sequence[int], blocksize: int) -> bool:
    """Return whether bitsandbytes multiplies by its own kernel, as its own code decides."""
    kernels: Any = sys.modules[_KERNELS]
    count = rows.numel() // rows.shape[-1]
    if count > kernels._gemm_4bit_custom_max_m or rows.shape[-1] % blocksize:
        return False
    for cached in (kernels._gpu_dispatch_props, kernels._gemm_4bit_use_custom_fn):
        cached.cache_clear()  # it may have seen another GPU
    chosen = kernels._gemm_4bit_use_custom_fn(rows.device.index, rows.dtype, count, *shape)
    return bool(chosen)


def _quantize_4bit(
    gpu: GPU,
    A: Tensor,  # noqa: N803
    blocksize: int,
    quant_storage: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rows, count = A.contiguous(), A.numel()
    scales = _scales(rows, blocksize)
    packed = (count + 1) // (quant_storage.itemsize * 2)
    return rows.new_empty((packed, 1), dtype=quant_storage), scales


def _quantize_blockwise(gpu: GPU, A: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:  # noqa: N803
    rows = A.contiguous()
    scales = _scales(rows, blocksize)
    return torch.empty_like(rows, dtype=torch.uint8), scales


def _scales(rows: Tensor, blocksize: int) -> Tensor:
    return rows.new_empty((-(rows.numel() // -blocksize),), dtype=torch.float32)


PARTS: dict[str, Composite] = {
    "bitsandbytes.gemm_4bit.default": _gemm_4bit,
    "bitsandbytes.quantize_4bit.default": _quantize_4bit,
    "bitsandbytes.quantize_blockwise.default": _quantize_blockwise,
}
"""By overload."""
