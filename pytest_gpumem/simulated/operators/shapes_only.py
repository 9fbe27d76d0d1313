"""Kernels for ``meta`` that torch does not have: shapes of operators that CUDA runs.

Source: the allocations of each operator's CUDA function (aten/src/ATen/native/cuda/
MultiMarginLoss.cu, MultiLabelMarginCriterion.cu, Distributions.cpp, native/BatchLinearAlgebra.cpp
(geqrf), native/quantized/cuda and native/quantized/FakeQuantPerTensorAffine.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _like_second(gradient: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(tensor)


def _like_first(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(tensor)


def _into(*_: Any, out: Tensor, **__: Any) -> Tensor:
    return out


def _with_mask(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    *batch, rows, columns = matrix.shape
    factored = matrix.new_empty((*batch, columns, rows)).mT
    return factored, matrix.new_empty((*batch, min(rows, columns)))


def _batched_product(
    added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)


def _int4_product(a: Tensor, b: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """``[m, k]`` times a packed ``[n / 8, k / (16 * inner), 32, inner / 2]``: ``[m, n]``.

    Raises ``RuntimeError`` in torch's words for what the kernel does not multiply.
    """
    inner = b.shape[3] * 2 if b.dim() == 4 else 0
    tiles = -(-a.shape[1] // 16) if a.dim() == 2 else 0
    for holds, condition in (
        (a.dtype is torch.bfloat16, "A.dtype() == at::kBFloat16"),
        (a.is_contiguous(), "A.is_contiguous()"),
        (a.dim() == 2, "A.dim() == 2"),
        (b.dtype is torch.int32, "B.dtype() == at::kInt"),
        (b.is_contiguous(), "B.is_contiguous()"),
        (b.dim() == 4, "B.dim() == 4"),
        (inner in (2, 4, 8), "B_innerKTiles == 2 || B_innerKTiles == 4 || B_innerKTiles == 8"),
        (
            tiles and inner and b.shape[1] == a.shape[1] // (inner * 16),
            "B.size(1) == k / (B_innerKTiles * kKTileSize)",
        ),
        (
            group in (32, 64, 128, 256),
            "qGroupSize == 32 || qGroupSize == 64 || qGroupSize == 128 || qGroupSize == 256",
        ),
        (scales_and_zeros.dim() == 3, "qScaleAndZeros.dim() == 3"),
        (scales_and_zeros.shape[1:] == (b.shape[0] * 8, 2), "qScaleAndZeros.size(1) == n"),
    ):
        if not holds:
            raise RuntimeError(f"Expected {condition} to be true, but got false.")
    return a.new_empty((a.shape[0], b.shape[0] * 8))


WRONG: dict[str, Callable[..., Any]] = {
    "baddbmm.dtype": _batched_product,
    "_weight_int4pack_mm": _int4_product,
}
"""By overload: replacements of kernels of torch's that take the result's type for a factor, or that
read the device that a tensor on ``meta`` is a fake of.

Source: torch/_decomp/decompositions.py (baddbmm, registered for all overloads) of 2.8 to 2.15,
torch/_meta_registrations.py (meta__weight_int4pack_mm) of 2.13; native/cuda/int4mm.cu.
"""

SHAPES: dict[str, Callable[..., Any]] = {
    "multi_margin_loss_backward": _like_second,
    "multilabel_margin_loss_backward": _like_second,
    "binomial": _like_first,
    "_sample_dirichlet": _like_first,
    "_dirichlet_grad": _like_first,
    "fractional_max_pool3d_backward": _like_second,
    "geqrf": _qr,
    "_scaled_mm.out": _into,
    "_scaled_mm_v2.out": _into,
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
}
"""By operator name, and what compiled code calls with a buffer of its own for the result."""
