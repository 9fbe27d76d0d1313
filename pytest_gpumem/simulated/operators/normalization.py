"""Batch norm: cuDNN's kernel where CUDA takes it.

Source: aten/src/ATen/native/Normalization.cpp (_batch_norm_impl_index and its use_cudnn condition),
native/cudnn/BatchNorm.cpp. cuDNN needs no workspace and no reserve in the modes of contiguous
tensors; of channels-last training it does, in sizes that only cuDNN knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LARGEST_BATCH = {True: 131_070, False: 262_136}
"""Rows of a two-dimensional input that cuDNN takes, by whether it trains."""
_LARGEST_SPATIAL_BATCH = {True: 880_801, False: 65_535}


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """``aten::batch_norm`` as CUDA takes it apart."""
    if (
        weight is not None
        and bias is not None
        and cudnn_enabled
        and input.numel()
        and input.is_cuda
        and torch.bfloat16 not in (input.dtype, weight.dtype)
        and (running_mean is None) == (running_var is None)
        and (running_mean is not None or training)
        and _batch_fits(input, training)
    ):
        kept = [input.contiguous(memory_format=_format(input)), weight.contiguous()]
        return torch.ops.aten.cudnn_batch_norm(  # type: ignore[no-any-return]  # an operator
            *kept, bias.contiguous(), running_mean, running_var, training, momentum, eps
        )[0]
    return _decomposed(  # type: ignore[no-any-return]  # an operator
        input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
    )


_decomposed = torch.ops.aten.batch_norm.default.decompose


def _batch_fits(input: Tensor, training: bool) -> bool:
    if input.dim() == 2:
        return input.shape[0] <= _LARGEST_BATCH[training]
    return input.dim() >= 3 and input.shape[0] <= _LARGEST_SPATIAL_BATCH[training]


def _format(input: Tensor) -> torch.memory_format:
    return torch._prims_common.suggest_memory_format(input)


COMPOSITES: dict[str, Callable[..., Any]] = {"aten.batch_norm.default": batch_norm}
