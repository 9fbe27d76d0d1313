"""The parts of a batch norm over several processes, which ``nn.SyncBatchNorm`` puts together.

Source: aten/src/ATen/native/cuda/Normalization.cu and .cuh (batch_norm_stats_cuda,
batch_norm_gather_stats_cuda, batch_norm_backward_reduce_cuda, batch_norm_backward_elemt_cuda,
batch_norm_update_stats_cuda and their templates), torch 2.6 to 2.15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import accumulated
from pytest_gpumem.simulated.operators.normalization import reads_channels_last, stage
from pytest_gpumem.simulated.operators.rules import Composite

_MOMENTS, _SUMS = 4, 2
"""Partial results that a block keeps of each channel."""


def _statistics(gpu: GPU, input: Tensor) -> tuple[Tensor, Tensor]:
    size, dtype = input.shape[1], accumulated(input.dtype)
    made = input.new_empty(size, dtype=dtype), input.new_empty(size, dtype=dtype)
    _reduce(gpu, input, _MOMENTS)
    return made


def _reduce(gpu: GPU, input: Tensor, values: int) -> None:
    if reads_channels_last(input):
        stage(gpu, input, values)
    else:
        _by_channel(input)


def _by_channel(input: Tensor) -> Tensor:
    return input.reshape(input.shape[0], input.shape[1], -1)


def _elemt(input: Tensor) -> Tensor:
    return torch.empty_like(input)


def _gathered(mean: Tensor) -> tuple[Tensor, Tensor]:
    size, dtype = mean.shape[1], accumulated(mean.dtype)
    return mean.new_empty(size, dtype=dtype), mean.new_empty(size, dtype=dtype)


def _gathered_of_equal(
    input: Tensor, mean: Tensor, running_mean: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    counts = torch.full((mean.shape[0],), count, dtype=torch.int64).to(input.device)
    counts = counts.to((input if running_mean is None else running_mean).dtype)
    return _gathered(mean)


def _backward_reduce(
    gpu: GPU,
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if reads_channels_last(grad_out) and reads_channels_last(input):
        sums = torch.empty_like(mean), torch.empty_like(mean)
        gradients = [_for_weight(wanted, mean, weight) for wanted in (weight_g, bias_g)]
        stage(gpu, input, _SUMS)
        return *(sums if input_g else (None, None)), *gradients
    kept = _by_channel(input), _by_channel(grad_out)
    sum_dy = torch.empty_like(mean) if input_g else None
    sum_dy_xmu = torch.empty_like(mean) if input_g else None
    grad_weight, grad_bias = [_for_weight(wanted, mean, weight) for wanted in (weight_g, bias_g)]
    del kept
    return sum_dy, sum_dy_xmu, grad_weight, grad_bias


def _for_weight(wanted: bool, mean: Tensor, weight: Tensor | None) -> Tensor | None:
    if not wanted:
        return None
    like = mean if weight is None else weight
    return like.new_empty(mean.shape)


def _backward_elemt(grad_out: Tensor, input: Tensor) -> Tensor:
    if reads_channels_last(grad_out) and reads_channels_last(input):
        return torch.empty_like(input)
    kept = _by_channel(input), _by_channel(grad_out)
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    del kept
    return grad_input


IN_VIEW: dict[str, Composite] = {
    "aten.batch_norm_stats.default": _statistics,
    "aten.batch_norm_update_stats.default": _statistics,
    "aten.batch_norm_elemt.default": _elemt,
    "aten.batch_norm_gather_stats.default": _gathered_of_equal,
    "aten.batch_norm_gather_stats_with_counts.default": _gathered,
    "aten.batch_norm_backward_reduce.default": _backward_reduce,
    "aten.batch_norm_backward_elemt.default": _backward_elemt,
}
"""By overload."""
