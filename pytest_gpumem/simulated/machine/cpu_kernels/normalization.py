"""Batch norm, softmax and root mean square norm as CUDA and cuDNN have them, computed on the CPU.

The parts of a batch norm over several processes are not computed: their results are unknown.
Source: aten/src/ATen/native/cudnn/BatchNorm.cpp of torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.cpu_kernels.differentiated import UNREAD

_aten = torch.ops.aten
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


def _batch_norm(*args: Any) -> Any:
    return *_aten.native_batch_norm(*args), UNREAD


def _batch_norm_backward(*args: Any) -> Any:
    input, gradient, weight, *kept, epsilon, _ = args
    given = gradient, input, weight, *kept, True, epsilon
    return _aten.native_batch_norm_backward(*given, [True, True, True])


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
    # Only CUDA's take half precision and return float32, and back (SoftMax.cu).
    "aten::_softmax": _softmax(_aten._softmax),
    "aten::_softmax_backward_data": _softmax_backward(_aten._softmax_backward_data),
    "aten::_log_softmax": _softmax(_aten._log_softmax),
    "aten::_log_softmax_backward_data": _softmax_backward(_aten._log_softmax_backward_data),
    "aten::_fused_rms_norm_backward": _fused_rms_norm_backward,
}
"""By operator name."""
