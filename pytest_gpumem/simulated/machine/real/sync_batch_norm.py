"""The parts of a batch norm over several processes, computed on the CPU.

Source: the kernels of aten/src/ATen/native/cuda/Normalization.cuh, torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _over_channels(input: Tensor) -> tuple[Tensor, list[int]]:
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    return wide, [dim for dim in range(input.dim()) if dim != 1]


def _as_channels(values: Tensor | None, input: Tensor) -> Tensor | float:
    if values is None:
        return 1.0
    return values.reshape(1, -1, *[1] * (input.dim() - 2))


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide, dims = _over_channels(input)
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return mean, torch.rsqrt(variance + eps)


def _update_stats(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    wide, dims = _over_channels(input)
    variance, mean = torch.var_mean(wide, dims, correction=0)
    count = input.numel() // input.shape[1]
    _blend(running_mean, mean, momentum)
    _blend(running_var, variance * count / max(count - 1, 1), momentum)
    return mean, variance


def _elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    wide, _ = _over_channels(input)
    centred = (wide - _as_channels(mean, input)) * _as_channels(invstd, input)
    shift = 0.0 if bias is None else _as_channels(bias, input)
    return (centred * _as_channels(weight, input) + shift).to(input.dtype)


def _gather_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = counts.to(mean.dtype).reshape(-1, 1)
    total = weights.sum()
    overall = (mean * weights).sum(0) / total
    squares = ((invstd**-2 - eps + (mean - overall) ** 2) * weights).sum(0)
    _blend(running_mean, overall, momentum)
    _blend(running_var, squares / (total - 1), momentum)
    return overall, torch.rsqrt(squares / total + eps)


def _gather(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    counts = torch.full((mean.shape[0],), count)
    return _gather_with_counts(
        input, mean, invstd, running_mean, running_var, momentum, eps, counts
    )


def _blend(running: Tensor | None, new: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(new * momentum)


def _backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    gradient, dims = _over_channels(grad_out)
    wide, _ = _over_channels(input)
    sum_dy = gradient.sum(dims)
    sum_dy_xmu = (gradient * (wide - _as_channels(mean, input))).sum(dims)
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        sum_dy_xmu * invstd if weight_g else None,
        sum_dy if bias_g else None,
    )


def _backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    gradient, _ = _over_channels(grad_out)
    wide, _ = _over_channels(input)
    total = count.sum()
    slope = _as_channels(sum_dy_xmu / total * invstd**2, input)
    centred = gradient - _as_channels(sum_dy / total, input)
    centred = centred - (wide - _as_channels(mean, input)) * slope
    scale = _as_channels(invstd, input) * _as_channels(weight, input)
    return (centred * scale).to(input.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::batch_norm_stats": _stats,
    "aten::batch_norm_update_stats": _update_stats,
    "aten::batch_norm_elemt": _elemt,
    "aten::batch_norm_gather_stats": _gather,
    "aten::batch_norm_gather_stats_with_counts": _gather_with_counts,
    "aten::batch_norm_backward_reduce": _backward_reduce,
    "aten::batch_norm_backward_elemt": _backward_elemt,
}
"""By operator name."""
