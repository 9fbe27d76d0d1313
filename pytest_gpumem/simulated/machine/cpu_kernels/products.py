"""Products and convolutions that only CUDA has kernels for, computed on the CPU.

The sums run in float32, as those of cuBLAS do for these types. Source: native_functions.yaml and
aten/src/ATen/native/cuda/Blas.cpp, ScaledBlas.cpp, GroupedBlas.cpp and Dropout.cu of torch 2.6 to
2.15. Layouts that are CUDA's own (int4 and 2:4 sparse weights, block scales in swizzled order) are
not computed: their results are unknown. Convolutions: native/cudnn/ConvShared.cpp.
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
    _refuse_blocks(scale_a, scale_b, of_rows=True)
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


def _refuse_blocks(*scales: Tensor, of_rows: bool = False) -> None:
    """Refuse scales of blocks; those ``of_rows`` or columns have no second dimension."""
    for scale in scales:
        if scale.dtype in _BLOCK_SCALES or (of_rows and min(scale.shape, default=1) > 1):
            raise NotImplementedError("scales of blocks")


def _scaled_grouped_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    _refuse_blocks(scale_a, scale_b)
    a, b = self, mat2
    flat = a.dim() == 2 and b.dim() == 2
    if flat:  # a group has its own scales of all rows and columns
        groups = 0 if offs is None else len(offs)
        scale_a, scale_b = scale_a.view(groups, -1), scale_b.view(groups, -1)
    else:
        a, b = a.float() * scale_a.unsqueeze(-1), b.float() * scale_b.unsqueeze(-2)
    product = _grouped(a.float(), b.float(), offs, (scale_a, scale_b) if flat else None)
    return product.to(out_dtype or torch.bfloat16)


def _grouped(
    a: Tensor, b: Tensor, offs: Tensor | None, scales: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return a product for each group: of rows, of columns, or of the summed dimension."""
    if offs is None:
        return a @ b
    ends: list[int] = offs.tolist()
    slices = [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]
    if a.dim() == 2 and b.dim() == 2:
        assert scales is not None
        return torch.stack(
            [
                (a[:, part] @ b[part]) * rows[:, None] * columns
                for part, rows, columns in zip(slices, *scales, strict=True)
            ]
        )
    if a.dim() == 2:
        out = a.new_zeros(a.shape[0], b.shape[-1])
        for part, matrix in zip(slices, b, strict=True):
            out[part] = a[part] @ matrix
        return out
    out = a.new_zeros(a.shape[-2], b.shape[-1])
    for part, matrix in zip(slices, a, strict=True):
        out[:, part] = matrix @ b[:, part]
    return out


def _fused_dropout(
    self: Tensor, p: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(self, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return self * mask / p, mask


def _masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask * scale


# cuDNN's convolutions under their own names.


def _convolution(
    self: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    output_padding: list[int] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    transposed = output_padding is not None
    added = output_padding or [0] * len(stride)
    settings = stride, padding, dilation, transposed, added, groups
    return torch.convolution(self, weight, bias, *settings)


def _convolution_relu(
    self: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    z: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:
    plain = _convolution(self, weight, stride, padding, dilation, groups, bias=bias)
    if z is not None:
        plain = plain + z * (1.0 if alpha is None else alpha)
    return plain.relu()


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
    "aten::_scaled_grouped_mm": _scaled_grouped_mm,
    "aten::_fused_dropout": _fused_dropout,
    "aten::_masked_scale": _masked_scale,
    "aten::cudnn_convolution": _convolution,
    "aten::cudnn_convolution_transpose": _convolution,
    "aten::cudnn_convolution_relu": _convolution_relu,
    "aten::cudnn_convolution_add_relu": _convolution_relu,
}
"""By name, with the overload if it is not the default."""
