"""Products that only CUDA has kernels for, computed on the CPU.

The sums run in float32, as those of cuBLAS do for these types. Source: native_functions.yaml and
aten/src/ATen/native/cuda/Blas.cpp, ScaledBlas.cpp and Dropout.cu of torch 2.6 to 2.15. Layouts that
are CUDA's own (int4 and 2:4 sparse weights, block scales in swizzled order), products of groups
with scales, and cuDNN's convolutions under their own names are not computed: their results are
unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BLOCK_SCALES = frozenset(
    found
    for name in ("float8_e8m0fnu", "float8_e4m3fn")
    if (found := getattr(torch, name, None)) is not None
)
"""Types of scales that stand for blocks, in an order of CUDA's own."""


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, **out: Tensor) -> Tensor:
    return _written(a.to(out_dtype) @ b.to(out_dtype), **out)


def _addmm(
    added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1,
    **out: Tensor,
) -> Tensor:  # fmt: skip
    product = alpha * (a.to(out_dtype) @ b.to(out_dtype))
    # Elements multiplied by zero may have any value.
    return _written(product if beta == 0 else product + beta * added.to(out_dtype), **out)


def _written(result: Tensor, out: Tensor | None = None) -> Tensor:
    return result if out is None else out.copy_(result)


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False, **out: Tensor,
) -> Tensor:  # fmt: skip
    _refuse_blocks(scale_a, scale_b)
    if scale_a.numel() > 1:
        scale_a = scale_a.reshape(-1, 1)
    if scale_b.numel() > 1:
        scale_b = scale_b.reshape(1, -1)
    product = (a.float() * scale_a) @ (b.float() * scale_b)
    product = product if bias is None else product + bias.float()
    narrow = (out_dtype or a.dtype).itemsize == 1
    if narrow and scale_result is not None:
        product = product * scale_result
    return _written(product.to(out_dtype or a.dtype), **out)


def _refuse_blocks(*scales: Tensor) -> None:
    """Refuse scales of blocks; those of rows or columns have no second dimension."""
    for scale in scales:
        if scale.dtype in _BLOCK_SCALES or min(scale.shape, default=1) > 1:
            raise NotImplementedError("scales of blocks")


def _fused_dropout(
    self: Tensor, p: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(self, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return self * mask / p, mask


def _masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask * scale


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::mm.dtype": _mm,
    "aten::mm.dtype_out": _mm,
    "aten::bmm.dtype": _mm,
    "aten::bmm.dtype_out": _mm,
    "aten::addmm.dtype": _addmm,
    "aten::addmm.dtype_out": _addmm,
    "aten::baddbmm.dtype": _addmm,
    "aten::baddbmm.dtype_out": _addmm,
    "aten::_scaled_mm": _scaled_mm,
    "aten::_scaled_mm.out": _scaled_mm,
    "aten::_fused_dropout": _fused_dropout,
    "aten::_masked_scale": _masked_scale,
}
"""By name, with the overload if it is not the default."""
