"""Normalisation: batch, layer and root mean square, and the temporaries of their kernels.

Source: aten/src/ATen/native/Normalization.cpp (_select_batch_norm_backend,
_batch_norm_impl_index), native/cudnn/BatchNorm.cpp, native/cuda/Normalization.cu and .cuh
(batch_norm_cuda, batch_norm_backward_cuda and their channels-last templates),
native/layer_norm.cpp (rms_norm_symint) and cuda/layer_norm_kernel.cu, of torch 2.6 to 2.15.
cuDNN needs no workspace and no reserve for batch norm of contiguous tensors; for channels-last
training it does, in sizes that only it determines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.real import kernels as real_kernels
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.layout import (
    INDEXABLE,
    accumulated,
    copied,
    suggested_format,
)
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, is_traced, passing

_aten = torch.ops.aten
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""By the input, by its weight and by its bias."""
_LARGEST_BATCH = {True: 880_801, False: 65_535}
"""Most samples that cuDNN normalises, by whether it trains."""


def batch_norm(
    gpu: GPU,
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
        and torch.backends.cudnn.enabled
        and input.numel()
        and input.is_cuda
        and torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and (running_mean is None) == (running_var is None)
        and (running_mean is not None or training)
        and input.dim() >= 3
        and input.shape[0] <= _LARGEST_BATCH[training]
        and (input.numel() < INDEXABLE or gpu.version < (2, 14))
    ):
        kept = [
            input.contiguous(memory_format=suggested_format(input)),
            weight.contiguous(),
            bias.contiguous(),
        ]
        output: Tensor
        output, _mean, _variance, _reserve = torch.ops.aten.cudnn_batch_norm(
            *kept, running_mean, running_var, training, momentum, eps
        )
        # _batch_norm_impl_index drops its copies, batch_norm then the rest of its results.
        del kept
        return output
    return _batch_norm(  # type: ignore[no-any-return]  # an operator
        input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
    )


_batch_norm = torch.ops.aten.batch_norm.default.decompose


def rms_norm(
    gpu: GPU,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> Tensor:
    """``aten::rms_norm``: one kernel since 2.9, for one type and contiguous layouts."""
    if (
        input.is_cuda
        and gpu.version >= (2, 9)
        and suggested_format(input) is torch.contiguous_format
        and not input.is_complex()
        and (weight is None or weight.dtype == input.dtype)
    ):
        fused = _TracedRmsNorm if is_traced(input) else _FusedRmsNorm
        return fused.apply(gpu, input, list(normalized_shape), weight, eps)  # type: ignore[no-any-return, no-untyped-call]  # torch's
    return _rms_norm(input, normalized_shape, weight, eps)  # type: ignore[no-any-return]  # an operator


_rms_norm = torch.ops.aten.rms_norm.default.decompose


class _FusedRmsNorm(torch.autograd.Function):
    """_fused_rms_norm_cuda and _fused_rms_norm_backward_cuda."""

    @staticmethod
    def forward(
        ctx: Any,
        gpu: GPU,
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None,
        eps: float | None,
    ) -> Tensor:
        kept = [input.contiguous(), None if weight is None else weight.contiguous()]
        rows = input.dim() - len(normalized_shape)
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        rstd = input.new_empty(
            (*input.shape[:rows], *[1] * len(normalized_shape)), dtype=accumulated(input.dtype)
        )
        del kept
        ctx.save_for_backward(input, weight, rstd)
        ctx.rows = math.prod(input.shape[:rows])
        ctx.settings = normalized_shape, eps
        ctx.gpu = gpu
        gpu.simulation.values.assign(output, torch.rms_norm, input, normalized_shape, weight, eps)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        kept = [input.contiguous(), None if weight is None else weight.contiguous()]
        grad_input = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
        if ctx.needs_input_grad[3]:
            grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        copied = gradients[0].contiguous()
        if grad_weight is not None and _sums_by_blocks(ctx.gpu, ctx.rows, grad_weight.numel()):
            blocks = _blocks(ctx.rows, grad_weight.numel())
            partial = grad_weight.new_empty((blocks, grad_weight.numel()))
            grad_weight = partial.sum(0).view(grad_weight.shape)
            del partial
        del copied, kept
        ctx.gpu.simulation.values.assign(
            (grad_input, grad_weight),
            real_kernels.rms_norm_backward,
            gradients[0],
            input,
            weight,
            *ctx.settings,
        )
        return None, grad_input, None, grad_weight, None


class _TracedRmsNorm(torch.autograd.Function):
    """RMS norm with autograd's formula on CUDA, of the operators that a compiler takes apart."""

    @staticmethod
    def forward(
        ctx: Any,
        gpu: GPU,
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None,
        eps: float | None,
    ) -> Tensor:
        output, rstd = _aten._fused_rms_norm(input, normalized_shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.normalized_shape = normalized_shape
        return output  # type: ignore[no-any-return]  # an operator

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
        grad_input, grad_weight = _aten._fused_rms_norm_backward(
            gradients[0], input, ctx.normalized_shape, rstd, weight, wanted
        )
        return None, grad_input, None, grad_weight, None


COMPOSITES: dict[str, Composite] = {
    "aten.batch_norm.default": batch_norm,
    "aten.rms_norm.default": rms_norm,
}


def _accumulated_bytes(tensor: Tensor) -> int:
    return accumulated(tensor.dtype).itemsize


# Batch norm's own kernels.

_CONTIGUOUS, _CHANNELS_LAST, _GENERAL = "contiguous", "channels last", "general"


def _implementation(input: Tensor, *others: Tensor) -> str:
    """batch_norm_choose_impl."""
    found = _implementation_of(input)
    return found if all(_implementation_of(other) == found for other in others) else _GENERAL


def _implementation_of(tensor: Tensor) -> str:
    if tensor.numel() > INDEXABLE:
        return _GENERAL
    if tensor.is_contiguous():
        return _CHANNELS_LAST if tensor.stride(1) == 1 else _CONTIGUOUS
    return _CHANNELS_LAST if _is_channels_last(tensor) else _GENERAL


def reads_channels_last(tensor: Tensor) -> bool:
    """batch_norm_use_channels_last_kernels."""
    return _is_channels_last(tensor) or (tensor.is_contiguous() and tensor.stride(1) == 1)


def _is_channels_last(tensor: Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


_LARGEST_BLOCK, _TILE, _PER_THREAD, _MOST_ROWS = 512, 32, 16, 128


def _staging(channels: int, per_channel: int) -> tuple[int, int]:
    """flexible_launch_configs: blocks over channels, and over the reduced dims."""
    width = min(reductions.power_below(channels), _TILE)
    height = min(reductions.power_below(-(-per_channel // _PER_THREAD)), _LARGEST_BLOCK // width)
    if width * height != _LARGEST_BLOCK:
        width = min(reductions.power_below(channels), _LARGEST_BLOCK // height)
    rows = min(-(-per_channel // (height * _PER_THREAD)), _MOST_ROWS)
    return -(-channels // width), 1 if rows < 8 else rows


def stage(gpu: GPU, input: Tensor, values: int) -> None:
    """Partial results of ``values`` numbers per channel, and the semaphores of their blocks."""
    channels = input.shape[1]
    columns, rows = _staging(channels, input.numel() // channels)
    if rows > 1:
        passing(gpu, values * channels * rows * _accumulated_bytes(input), 4 * columns)


def _batch_norm_forward(
    gpu: GPU, input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool
) -> None:
    implementation = _implementation(input)
    if training and implementation == _CHANNELS_LAST:
        stage(gpu, input, 4)
    elif training and implementation == _GENERAL:
        kept = [dim for dim in range(input.dim()) if dim != 1]
        reductions.reduce_tensor(gpu, input, kept, reductions.MOMENTS, input.dtype)
    if implementation == _GENERAL:
        missing = [tensor for tensor in (weight, bias) if tensor is None]
        passing(gpu, *[_accumulated_bytes(input)] * len(missing))


def _batch_norm_backward(
    gpu: GPU,
    grad_out: Tensor,
    input: Tensor,
    save_mean: Tensor | None,
    train: bool,
    output_mask: Sequence[bool],
    result: _Gradients,
) -> Iterator[Tensor]:
    adopt = gpu.simulation.storages.adopt
    by_input, by_weight, by_bias = output_mask
    grad_input, grad_weight, grad_bias = result
    reduces = train or by_weight or by_bias
    if reduces and by_input and not reads_channels_last(input) and input.numel() <= INDEXABLE:
        scratch = Scratch(gpu, 0 if _merges(grad_out) else grad_out.nbytes)
        for gradient, wanted in zip(result, output_mask, strict=True):
            if wanted and gradient is not None:
                yield gradient
        scratch.free()
        return
    scratch = Scratch(gpu)
    if reduces:
        sums = input.shape[1] * _accumulated_bytes(input)
        if save_mean is not None and not save_mean.numel():
            scratch.take(sums)
        scratch.take(sums)
        scratch.take(sums)
        for gradient in (grad_weight, grad_bias):
            if gradient is not None:
                adopt(gradient, gpu)
        if reads_channels_last(grad_out) and reads_channels_last(input):
            stage(gpu, input, 2)
    if by_input and grad_input is not None:
        adopt(grad_input, gpu)
    scratch.free()


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


# Layer norm and root mean square norm.

_WARP = 32
_MANY_ROWS = 64 * 1024
_LARGEST_GRID = 64 * 1024 // 2


def _sums_by_blocks(gpu: GPU, rows: int, columns: int) -> bool:
    """LaunchGammaBetaBackwardCUDAKernel, since 2.8: many short rows are summed in two passes."""
    return (
        gpu.version >= (2, 8) and rows > _MANY_ROWS and columns // _WARP < gpu.model.sm_count // 2
    )


def _blocks(rows: int, columns: int) -> int:
    return min(_LARGEST_GRID // -(-columns // _WARP), -(-rows // _WARP))


def _layer_norm_before(
    gpu: GPU, input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Scratch:
    return Scratch(gpu, *copied(input, weight, bias))


def _layer_norm_gradients(
    gpu: GPU,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    result: _Gradients,
) -> Iterator[Tensor]:
    grad_input, *others = result
    given = [tensor for tensor in others if tensor is not None]
    rows, columns = _rows_and_columns(input, normalized_shape)
    if not given or not _sums_by_blocks(gpu, rows, columns):
        yield from (tensor for tensor in result if tensor is not None)
        return
    adopt = gpu.simulation.storages.adopt
    scratch = Scratch(gpu)
    if grad_input is not None:
        adopt(grad_input, gpu)
    first = [scratch.take(tensor.nbytes) for tensor in given]
    if not grad_out.is_contiguous():
        scratch.take(grad_out.nbytes)
    blocks = _blocks(rows, columns)
    for _ in given:
        scratch.take(blocks * columns * input.element_size())
    for tensor, earlier in zip(given, first, strict=True):
        # The sum of the partial results takes the place of the memory allocated for it.
        adopt(tensor, gpu)
        shape, dtype = (blocks, columns), input.dtype
        reductions.reduce(gpu, shape, (columns, 1), dtype, 0, reductions.SUMS, dtype)
        scratch.drop(earlier)
    scratch.free()


def _layer_norm_backward(
    gpu: GPU, grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int]
) -> None:
    if not _sums_by_blocks(gpu, *_rows_and_columns(input, normalized_shape)):
        passing(gpu, *copied(grad_out))


def _rows_and_columns(input: Tensor, normalized_shape: Sequence[int]) -> tuple[int, int]:
    columns = math.prod(normalized_shape)
    return input.numel() // max(columns, 1), columns


RULES = {
    "aten::native_batch_norm": Rule(after=_batch_norm_forward),
    "aten::native_batch_norm_backward": Rule(placed=_batch_norm_backward),
    "aten::native_layer_norm": Rule(before=_layer_norm_before),
    "aten::native_layer_norm_backward": Rule(
        before=_layer_norm_before, placed=_layer_norm_gradients, after=_layer_norm_backward
    ),
}
