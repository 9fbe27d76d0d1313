"""Gradients whose layout is another on CUDA than in torch's formula, which ``meta`` runs.

That formula has the layout of the gradient it is given, or of what it is multiplied by; CUDA's
kernels allocate the result before. A compiler that traces sees the formula's, as it does on a GPU.
Each is seen on the dry device, 2.15, with gradients and inputs that are transposed, or have their
channels last, and that are not.

Source: torch/_decomp/decompositions.py (the functions of the same names) of 2.8 to 2.15;
aten/src/ATen/native/cuda/layer_norm_kernel.cu (layer_norm_backward_cuda), Normalization.cuh
(batch_norm_backward_cuda_template), native/cudnn/BatchNorm.cpp (cudnn_batch_norm_backward),
native/Loss.cpp (mse_loss_backward), native/SoftMax.cpp (log_softmax_backward_data) and
native/Activation.cpp (hardswish_backward, elu_backward).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions

from pytest_gpumem.simulated.operators.layout import suggested_format
from pytest_gpumem.simulated.operators.rules import is_traced

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""By the input, by its weight and by its bias."""


def layer_norm(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> _Gradients:
    """Contiguous."""
    gradient = torch.empty_like(input, memory_format=torch.contiguous_format)
    return (
        gradient if output_mask[0] else None,
        torch.empty_like(weight) if output_mask[1] and weight is not None else None,
        torch.empty_like(bias) if output_mask[2] and bias is not None else None,
    )


def cudnn_batch_norm(input: Tensor, grad_output: Tensor, weight: Tensor, *args: Any) -> _Gradients:
    """As the input's format."""
    gradient = torch.empty_like(input, memory_format=suggested_format(input))
    return gradient, torch.empty_like(weight), torch.empty_like(weight)


def batch_norm(grad_out: Tensor, input: Tensor, *args: Any) -> _Gradients:
    """As the input's format."""
    gradient, *others = decompositions.native_batch_norm_backward(grad_out, input, *args)
    if gradient is not None:
        gradient = torch.empty_like(input, memory_format=suggested_format(input))
    return gradient, others[0], others[1]


def _like_first(gradient: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(gradient)


def _contiguous(gradient: Tensor, input: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def log_softmax(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Contiguous."""
    return grad_output.new_empty(grad_output.shape, dtype=input_dtype)


def _where_it_runs(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    formula: Callable[..., Any] = getattr(decompositions, name)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(one, Tensor) and is_traced(one) for one in args)
        return (formula if traced else kernel)(*args, **kwargs)

    return gradient


WRONG: dict[str, Callable[..., Any]] = {
    name: _where_it_runs(name, kernel)
    for name, kernel in (
        ("native_layer_norm_backward", layer_norm),
        ("native_batch_norm_backward", batch_norm),
        ("cudnn_batch_norm_backward", cudnn_batch_norm),
        ("mse_loss_backward", _contiguous),
        ("_log_softmax_backward_data", log_softmax),
        ("hardswish_backward", _like_first),
        ("elu_backward", _like_first),
    )
}
"""By overload: replacements of torch's kernels for ``meta``."""
