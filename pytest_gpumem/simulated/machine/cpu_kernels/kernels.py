"""Operators that only CUDA has a kernel for, computed on the CPU from others.

Batch norm, softmax and root mean square norm are as CUDA and cuDNN have them. The parts of a batch
norm over several processes are not computed: their results are unknown.

A function's parameters are arguments of its operator's schema, and it returns the operator's
results: ``UNREAD`` for one that no formula reads, an integer for a tensor that is filled with it.

Source: aten/src/ATen/native/cuda/EmbeddingBag.cu (EmbeddingBag_updateOutputKernel_sum_mean and
_max: which bag each index is in, and how many indices of a bag are no padding), SummaryOps.cu
(_histc_cuda_template, getBin), ../GridSamplerUtils.h (cond_cudnn_grid_sampler) and
../cudnn/BatchNorm.cpp, of torch 2.6 to 2.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pytest_gpumem.simulated.machine.cpu_kernels import attention, products, recurrent
from pytest_gpumem.simulated.machine.signatures import UNREAD, Kwargs, Signature, is_out

_aten = torch.ops.aten
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
_MAX = 2
"""EmbeddingBagMode."""


def in_float32(
    compute: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs, *, writes: bool
) -> Any:
    """Compute in float32 if the CPU has no half-precision kernel."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widened(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES:
            pairs.append((value, value.float()))
            return pairs[-1][1]
        return torch.float32 if isinstance(value, torch.dtype) and value in HALF_DTYPES else value

    wide, named = tree_map(widened, (args, kwargs))
    computed = compute(*wide, **named)
    if writes:
        for narrow, result in pairs:
            narrow.copy_(result)
    return () if computed is None else computed


def _embedding_bag(
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    *args: Any,
) -> Any:
    output, _, _, highest = _aten._embedding_bag(*args)
    starts = offsets[:-1] if include_last_offset else offsets
    places = torch.arange(indices.numel(), dtype=offsets.dtype, device="cpu")
    bags = torch.searchsorted(starts.contiguous(), places, right=True) - 1
    counted = bags[indices != padding_idx]
    sizes = counted.bincount(minlength=offsets.numel())
    chosen = highest if mode == _MAX else 0  # memory that is not written is not read either
    return output, bags.to(indices.dtype), sizes.to(indices.dtype), chosen


def _histc(self: Tensor, bins: int, min: float, max: float) -> Tensor:
    """Count integers as CUDA does: it finds bins by integer division, and counts in their type."""
    if self.dtype.is_floating_point:
        counted: Tensor = _aten.histc(self, bins, min, max)
        return counted
    low, high = int(min), int(max)
    if low == high and self.numel():
        low, high = int(self.min()), int(self.max())
    if low == high:
        low, high = low - 1, high + 1
    values = self.flatten().long()
    inside = values[(values >= low) & (values <= high)]
    found = ((inside - low) * bins).div(high - low, rounding_mode="trunc").clamp_(max=bins - 1)
    return found.bincount(minlength=bins).to(self.dtype)


_BY_CUDNN = (0, 0, True)
"""The only mode in which cuDNN samples: bilinear, zeros around, corners aligned."""


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


_KERNELS: dict[str, Callable[..., Any]] = {
    **attention.KERNELS,
    **products.KERNELS,
    **recurrent.KERNELS,
    "aten::cudnn_batch_norm": lambda *args: (*_aten.native_batch_norm(*args), UNREAD),
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    # Only CUDA's take half precision and return float32, and back (SoftMax.cu).
    "aten::_softmax": _softmax(_aten._softmax),
    "aten::_softmax_backward_data": _softmax_backward(_aten._softmax_backward_data),
    "aten::_log_softmax": _softmax(_aten._log_softmax),
    "aten::_log_softmax_backward_data": _softmax_backward(_aten._log_softmax_backward_data),
    "aten::_fused_rms_norm_backward": _fused_rms_norm_backward,
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "aten::cudnn_grid_sampler": lambda self, grid: _aten.grid_sampler_2d(self, grid, *_BY_CUDNN),
    "aten::cudnn_grid_sampler_backward": lambda self, grid, grad_output: (
        _aten.grid_sampler_2d_backward(grad_output, self, grid, *_BY_CUDNN, [True, True])
    ),
    "aten::histc": _histc,
    # CUDA's forward pass leaves the buffer empty.
    "aten::log_sigmoid_backward": lambda grad_output, self: _aten.log_sigmoid_backward(
        grad_output, self, self.abs().neg().exp()
    ),
}
"""By operator name, with the overload where only that one has a kernel here."""


@cache
def kernel_of(func: Any) -> Callable[..., Any]:
    """Return a function with the parameters of ``func`` that computes it on the CPU."""
    kernel = _KERNELS.get(func.name(), _KERNELS.get(func._schema.name))
    if kernel is None:
        return func  # type: ignore[no-any-return]  # an operator
    parameters = inspect.signature(kernel).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    # A kernel that writes to no ``out`` refuses one.
    is_called_alike = takes_all or is_out(func._schema)
    return kernel if is_called_alike else Signature(func._schema).bound(kernel)
