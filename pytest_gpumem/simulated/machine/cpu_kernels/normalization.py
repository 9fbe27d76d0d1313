"""Batch norm, softmax and root mean square norm as CUDA and cuDNN have them, computed on the CPU.

Source: aten/src/ATen/native/cudnn/BatchNorm.cpp and the kernels of native/cuda/Normalization.cuh,
which compute the parts of a batch norm over several processes, of torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.cpu_kernels.differentiated import UNREAD, leaf, with_autograd

_aten = torch.ops.aten
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


def _batch_norm(*args: Any) -> Any:
    return *_aten.native_batch_norm(*args), UNREAD


def _batch_norm_backward(*args: Any) -> Any:
    input, gradient, weight, *kept, epsilon, _ = args
    given = gradient, input, weight, *kept, True, epsilon
    return _aten.native_batch_norm_backward(*given, [True, True, True])


def _over_channels(input: Tensor) -> tuple[Tensor, list[int]]:
    wide = input.float() if input.dtype in HALF_DTYPES else input
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
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> Tensor:
    wide, _ = _over_channels(input)
    centred = (wide - _as_channels(mean, input)) * _as_channels(invstd, input)
    shift = 0.0 if bias is None else _as_channels(bias, input)
    return (centred * _as_channels(weight, input) + shift).to(input.dtype)


def _gather(
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor | None = None,
    count: int = 0,
) -> tuple[Tensor, Tensor]:
    given = torch.full((mean.shape[0],), count) if counts is None else counts
    weights = given.to(mean.dtype).reshape(-1, 1)
    total = weights.sum()
    overall = (mean * weights).sum(0) / total
    squares = ((invstd**-2 - eps + (mean - overall) ** 2) * weights).sum(0)
    _blend(running_mean, overall, momentum)
    _blend(running_var, squares / (total - 1), momentum)
    return overall, torch.rsqrt(squares / total + eps)


def _blend(running: Tensor | None, new: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(new * momentum)


def _backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
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


def _softmax(operator: Any) -> Callable[..., Any]:
    def compute(input: Tensor, dim: int, half_to_float: bool, **out: Tensor) -> Any:
        return operator(input.float() if half_to_float else input, dim, False, **out)

    return compute


def _softmax_backward(operator: Any) -> Callable[..., Any]:
    def compute(
        gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype, **out: Tensor
    ) -> Any:
        result = operator(gradient, output, dim, gradient.dtype, **out)
        return result if out else result.to(input_dtype)

    return compute


def rms_norm_backward(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: list[int],
    eps: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of ``torch.rms_norm`` by input and weight."""
    with with_autograd():
        data = leaf(input)
        scale = None if weight is None else leaf(weight)
        out = torch.rms_norm(data, normalized_shape, scale, eps)
        found = torch.autograd.grad(out, [data, *([] if scale is None else [scale])], gradient)
    return found[0], found[1] if scale is not None else None


def _fused_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
) -> Any:
    wide = input.float()
    scale = rstd.float()
    grown = grad_out.float() * (1.0 if weight is None else weight.float())
    dims = tuple(range(-len(normalized_shape), 0))
    shared = (grown * wide).mean(dims, keepdim=True)
    by_input = scale * grown - scale**3 * wide * shared
    by_weight = (grad_out.float() * wide * scale).flatten(0, -len(normalized_shape) - 1).sum(0)
    return by_input.to(input.dtype), UNREAD if weight is None else by_weight.to(weight.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::batch_norm_stats": _stats,
    "aten::batch_norm_update_stats": _update_stats,
    "aten::batch_norm_elemt": _elemt,
    "aten::batch_norm_gather_stats": _gather,
    "aten::batch_norm_gather_stats_with_counts": _gather,
    "aten::batch_norm_backward_reduce": _backward_reduce,
    "aten::batch_norm_backward_elemt": _backward_elemt,
    # Only CUDA's take half precision and return float32, and back (SoftMax.cu).
    "aten::_softmax": _softmax(_aten._softmax),
    "aten::_softmax_backward_data": _softmax_backward(_aten._softmax_backward_data),
    "aten::_log_softmax": _softmax(_aten._log_softmax),
    "aten::_log_softmax_backward_data": _softmax_backward(_aten._log_softmax_backward_data),
    "aten::_fused_rms_norm_backward": _fused_rms_norm_backward,
}
"""By operator name."""
