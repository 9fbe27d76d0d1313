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


WRONG: dict[str, Callable[..., Any]] = {"baddbmm.dtype": _batched_product}
"""By overload: what torch has a kernel for that takes the result's type for a factor.

Source: torch/_decomp/decompositions.py (baddbmm, registered for all overloads) of 2.8 to 2.15.
"""

SHAPES: dict[str, Callable[..., Any]] = {
    "multi_margin_loss_backward": _like_second,
    "multilabel_margin_loss_backward": _like_second,
    "binomial": _like_first,
    "_sample_dirichlet": _like_first,
    "_dirichlet_grad": _like_first,
    "geqrf": _qr,
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
}
"""By operator name."""
