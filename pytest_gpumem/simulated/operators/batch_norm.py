"""Batch norm, of one process and of several, and the temporaries of its kernels.

Source: aten/src/ATen/native/Normalization.cpp (_select_batch_norm_backend,
_batch_norm_impl_index), native/cudnn/BatchNorm.cpp, native/cuda/Normalization.cu and .cuh
(batch_norm_cuda, batch_norm_backward_cuda and their channels-last templates, also as
_batch_norm_with_update_cuda and _new_batch_norm_backward_cuda call them; batch_norm_stats_cuda,
batch_norm_gather_stats_cuda, batch_norm_backward_reduce_cuda, batch_norm_backward_elemt_cuda and
batch_norm_update_stats_cuda, which ``nn.SyncBatchNorm`` puts together), of torch 2.6 to 2.15.
cuDNN needs no workspace and no reserve for batch norm of contiguous tensors; for channels-last
training it does, in sizes that only it determines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.layout import INDEXABLE, accumulated, suggested_format
from pytest_gpumem.simulated.operators.rules import (
    Composite,
    Gradients,
    Rule,
    Scratch,
    borrow,
    decompose,
)

_LARGEST_BATCH = {True: 880_801, False: 65_535}
"""Most samples that cuDNN normalises, by whether it trains."""


def _by_cudnn(
    gpu: GPU,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
) -> bool:
    """Return whether _select_batch_norm_backend chooses cuDNN."""
    return (
        weight is not None
        and bias is not None
        and torch.backends.cudnn.enabled
        and input.numel() > 0
        and torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and (running_mean is None) == (running_var is None)
        and (running_mean is not None or training)
        and input.dim() >= 3
        and input.shape[0] <= _LARGEST_BATCH[training]
        and (input.numel() < INDEXABLE or gpu.version < (2, 14))
    )


def batch_norm(gpu: GPU, *args: Any) -> Tensor:
    """Run ``aten::batch_norm`` by the kernels that CUDA chooses."""
    input, weight, bias = args[:3]
    if not (input.is_cuda and _by_cudnn(gpu, *args[:6])):
        return decompose(torch.ops.aten.batch_norm.default, *args)
    kept = [input.contiguous(memory_format=suggested_format(input))]
    kept += [weight.contiguous(), bias.contiguous()]
    output: Tensor
    output, _mean, _variance, _reserve = torch.ops.aten.cudnn_batch_norm(*kept, *args[3:8])
    # _batch_norm_impl_index drops its copies, batch_norm then the rest of its results.
    del kept
    return output


def _accumulated_bytes(tensor: Tensor) -> int:
    return accumulated(tensor.dtype).itemsize


# Batch norm's own kernels.

_MOMENTS, _SUMS = 4, 2
"""Partial results that a block keeps of each channel."""


def _reads_channels_last(tensor: Tensor) -> bool:
    """Return batch_norm_use_channels_last_kernels."""
    return _is_channels_last(tensor) or (tensor.is_contiguous() and tensor.stride(1) == 1)


def _is_channels_last(tensor: Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


_LARGEST_BLOCK, _TILE, _PER_THREAD, _MOST_ROWS, _FEWEST_ROWS = 512, 32, 16, 128, 8


def _stage(gpu: GPU, input: Tensor, values: int) -> None:
    """Allocate ``values`` partial results per channel, and the semaphores of their blocks.

    flexible_launch_configs: blocks over channels, and over the reduced dims.
    """
    channels = input.shape[1]
    per_channel = input.numel() // channels
    width = min(reductions.power_below(channels), _TILE)
    height = min(reductions.power_below(-(-per_channel // _PER_THREAD)), _LARGEST_BLOCK // width)
    if width * height != _LARGEST_BLOCK:
        width = min(reductions.power_below(channels), _LARGEST_BLOCK // height)
    rows = min(-(-per_channel // (height * _PER_THREAD)), _MOST_ROWS)
    if rows >= _FEWEST_ROWS:
        columns = -(-channels // width)
        borrow(gpu, values * channels * rows * _accumulated_bytes(input), 4 * columns)


def _layout(tensor: Tensor) -> torch.memory_format | None:
    """Return batch_norm_choose_impl, ``None`` if general; channels last is known of images only."""
    if tensor.numel() > INDEXABLE:
        return None
    if tensor.is_contiguous():
        return torch.channels_last if tensor.stride(1) == 1 else torch.contiguous_format
    return torch.channels_last if tensor.dim() == 4 and _is_channels_last(tensor) else None


def _batch_norm_forward(
    gpu: GPU, input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool
) -> None:
    layout = _layout(input)
    if training and layout is None:
        # make_reduction: of 16 bits only float16 is read as it is into two results.
        is_converted = input.dtype == torch.bfloat16
        kept = [dim for dim in range(input.dim()) if dim != 1]
        with Scratch(gpu, input.numel() * _accumulated_bytes(input) if is_converted else 0):
            reductions.reduce_tensor(gpu, input, kept, reductions.MOMENTS)
    elif training and layout is torch.channels_last:
        _stage(gpu, input, _MOMENTS)
    if layout is None:
        borrow(gpu, *[_accumulated_bytes(input) for given in (weight, bias) if given is None])


def _batch_norm_backward(
    gpu: GPU,
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    save_mean: Tensor | None,
    train: bool,
    output_mask: Sequence[bool],
    result: Gradients,
) -> Iterator[Tensor]:
    by_input, by_weight, by_bias = output_mask
    reduces = train or by_weight or by_bias
    if reduces and by_input and not _reads_channels_last(input) and input.numel() <= INDEXABLE:
        with Scratch(gpu, 0 if _merges(grad_out) else grad_out.nbytes):
            yield from (gradient for gradient in result if gradient is not None)
        return
    scratch = Scratch(gpu)
    if reduces:
        sums = input.shape[1] * _accumulated_bytes(input)
        if save_mean is not None and not save_mean.numel():
            scratch.take(sums)
        are_channels_last = _reads_channels_last(grad_out) and _reads_channels_last(input)
        if by_input or are_channels_last:
            scratch.take(sums, sums)
        yield from (gradient for gradient in result[1:] if gradient is not None)
        if are_channels_last:
            _stage(gpu, input, _SUMS)
    if by_input and result[0] is not None:
        # batch_norm_elementwise_backward_train: the general kernel reads a weight.
        layout = _layout(input)
        is_general = layout is None or layout is not _layout(grad_out)
        if train and weight is None and is_general:
            scratch.take(_accumulated_bytes(input))
        yield result[0]


def _update(gpu: GPU, *args: Any) -> None:
    """Allocate for _batch_norm_with_update_cuda, of programs that torch.export made."""
    input, weight, bias, mean, variance = args[:5]
    if not _by_cudnn(gpu, input, weight, bias, mean, variance, training=True):
        _batch_norm_forward(gpu, input, weight, bias, training=True)


def _update_backward(
    gpu: GPU,
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    update: bool,
    output_mask: Sequence[bool],
    result: Gradients,
) -> Iterable[Tensor]:
    """Return the outputs of _new_batch_norm_backward_cuda, in order."""
    if _by_cudnn(gpu, input, weight, weight, running_mean, running_var, update):
        return [gradient for gradient in result if gradient is not None]
    return _batch_norm_backward(
        gpu, grad_out, input, weight, save_mean, update, output_mask, result
    )


def _merges(gradient: Tensor) -> bool:
    """Return whether reshaping to (batch, channels, rest) is a view."""
    size = stride = None
    for at in range(gradient.dim() - 1, 1, -1):
        if gradient.shape[at] == 1:
            continue
        if size is not None and gradient.stride(at) != size * stride:  # type: ignore[operator]
            return False
        size, stride = gradient.shape[at], gradient.stride(at)
    return True


# The parts of a batch norm over several processes.


def _statistics(gpu: GPU, input: Tensor) -> tuple[Tensor, Tensor]:
    made = _gathered(input)
    if _reads_channels_last(input):
        _stage(gpu, input, _MOMENTS)
    else:
        _by_channel(input)
    return made


def _by_channel(input: Tensor) -> Tensor:
    return input.reshape(input.shape[0], input.shape[1], -1)


def _gathered(mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return two numbers of each channel."""
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
) -> tuple[Tensor | None, ...]:
    are_channels_last = _reads_channels_last(grad_out) and _reads_channels_last(input)
    kept = () if are_channels_last else (_by_channel(input), _by_channel(grad_out))
    sums = [torch.empty_like(mean) for _ in range(2 if input_g or are_channels_last else 0)]
    like = mean if weight is None else weight
    gradients = [like.new_empty(mean.shape) if one else None for one in (weight_g, bias_g)]
    if are_channels_last:
        _stage(gpu, input, _SUMS)
    del kept
    return *(sums if input_g else (None, None)), *gradients


def _backward_elemt(grad_out: Tensor, input: Tensor) -> Tensor:
    if _reads_channels_last(grad_out) and _reads_channels_last(input):
        return torch.empty_like(input)
    kept = _by_channel(input), _by_channel(grad_out)
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    del kept
    return grad_input


ABOVE_AUTOGRAD: dict[str, Composite] = {"aten.batch_norm.default": batch_norm}
BELOW_AUTOGRAD: dict[str, Composite] = {
    "aten.batch_norm_stats.default": _statistics,
    "aten.batch_norm_update_stats.default": _statistics,
    "aten.batch_norm_elemt.default": lambda input: torch.empty_like(input),
    "aten.batch_norm_gather_stats.default": _gathered_of_equal,
    "aten.batch_norm_gather_stats_with_counts.default": _gathered,
    "aten.batch_norm_backward_reduce.default": _backward_reduce,
    "aten.batch_norm_backward_elemt.default": _backward_elemt,
}

RULES = {
    "native_batch_norm _native_batch_norm_legit": Rule(
        outputs=lambda result, out=None: result if out is None else (*result[1:], result[0]),
        after=_batch_norm_forward,
    ),
    "native_batch_norm_backward": Rule(outputs=_batch_norm_backward),
    "_batch_norm_with_update": Rule(after=_update),
    "batch_norm_backward": Rule(outputs=_update_backward),
}
