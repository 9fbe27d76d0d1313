"""Products that only CUDA has kernels for, computed on the CPU.

The sums run in float32, as those of cuBLAS do for these types. Source: native_functions.yaml and
aten/src/ATen/native/cuda/Blas.cpp, ScaledBlas.cpp, int4mm.cu and Dropout.cu of torch 2.6 to 2.15.
Private layouts of libraries (2:4 sparse weights, block scales in swizzled order), grouped products
with scales, and the operators of cuDNN's convolutions are not computed: their results are unknown.
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
"""Types of block scales, which CUDA keeps in swizzled order."""


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
    for scale in (scale_a, scale_b):  # those of rows or columns have no second dimension
        if scale.dtype in _BLOCK_SCALES or min(scale.shape, default=1) > 1:
            raise NotImplementedError("scales of blocks")
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


_NIBBLES = (torch.arange(4).view(2, 2, 1) * 4 + torch.arange(2) * 16).to(torch.int64)
"""Bits by which a number is shifted in its word: by tile of 16 columns, half of it, and parity."""


def _convert_weight_to_int4pack(*arguments: Any) -> Tensor:
    """Pack as matrix_to_m16n8k16_Bint4_layout: a word for each of 32 threads and each two tiles."""
    weight, inner_k_tiles = arguments
    rows, columns = weight.shape[0], weight.shape[1] * 2
    numbers = torch.stack([weight >> 4, weight & 15], -1).to(torch.int64)
    tiles = numbers.view(rows // 8, 8, -1, inner_k_tiles // 2, 2, 2, 4, 2)
    words = (tiles.permute(0, 2, 1, 6, 3, 4, 5, 7) << _NIBBLES).sum((-3, -2, -1))
    outer = columns // (inner_k_tiles * 16)
    return words.to(torch.int32).view(rows // 8, outer, 32, inner_k_tiles // 2)


def _weight_int4pack_mm(*arguments: Any) -> Tensor:
    a, packed, group, scales_and_zeros = arguments
    words = packed.view(*packed.shape[:2], 8, 4, -1, 1, 1, 1)
    tiles = ((words >> _NIBBLES) & 15).permute(0, 2, 1, 4, 5, 6, 3, 7)
    numbers = tiles.reshape(packed.shape[0] * 8, -1).float() - 8
    scales, zeros = scales_and_zeros.float().repeat_interleave(group, 0).unbind(-1)
    product: Tensor = (a.float() @ (numbers.t() * scales + zeros)).to(a.dtype)
    return product


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
    "aten::_convert_weight_to_int4pack": _convert_weight_to_int4pack,
    "aten::_weight_int4pack_mm": _weight_int4pack_mm,
    "aten::_fused_dropout": _fused_dropout,
    "aten::_masked_scale": _masked_scale,
}
"""By name, with the overload if it is not the default."""
