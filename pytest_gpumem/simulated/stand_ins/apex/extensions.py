"""``fused_layer_norm_cuda`` and ``amp_C``: what the kernels of apex allocate.

Source: csrc/layer_norm_cuda.cpp, csrc/layer_norm_cuda_kernel.cu (HostLayerNormGradient,
HostRMSNormGradient), csrc/amp_C_frontend.cpp, csrc/multi_tensor_apply.cuh and
csrc/multi_tensor_*.cu of apex 25.09.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.operators.layout import HALVES
from pytest_gpumem.simulated.stand_ins.registering import compiled
from pytest_gpumem.simulated.stand_ins.usage import used

_PARTS = 16
"""part_size: rows of partial gradients of weights, which a second kernel sums."""
_BLOCKS = 320
"""Partial sums of multi_tensor_l2norm, one of each block."""

Shape = Sequence[int]


def _checked(input: Tensor, shape: Shape, *others: Tensor | None) -> int:
    """CHECK_INPUT and check_args; how many rows there are."""
    used("apex")
    for tensor in (input, *others):
        if tensor is not None and not tensor.is_cuda:
            raise RuntimeError("input must be a CUDA tensor")
        if tensor is not None and not tensor.is_contiguous():
            raise RuntimeError("input must be contiguous")
    first = input.dim() - len(shape)
    if tuple(input.shape[first:]) != tuple(shape):
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape "
            f"[*, {', '.join(map(str, shape))}], but got input of size {list(input.shape)}"
        )
    return input.shape[:first].numel()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


def layer_norm(
    input: Tensor,
    shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    mixed: bool = False,
) -> list[Tensor]:
    """layer_norm_affine and its siblings: output, mean and inverse of the deviation."""
    rows = _checked(input, shape, weight, bias)
    output = _output(input, weight, mixed=mixed)
    mean = input.new_empty(rows, dtype=_wide(input.dtype))
    return [output, mean, torch.empty_like(mean)]


def rms_norm(
    input: Tensor, shape: Shape, weight: Tensor | None, eps: float, *, mixed: bool = False
) -> list[Tensor]:
    """rms_norm_affine and its siblings: output and inverse of the root of mean squares."""
    rows = _checked(input, shape, weight)
    output = _output(input, weight, mixed=mixed)
    return [output, input.new_empty(rows, dtype=_wide(input.dtype))]


def _output(input: Tensor, weight: Tensor | None, *, mixed: bool) -> Tensor:
    dtype = weight.dtype if mixed and weight is not None else input.dtype
    return torch.empty_like(input, dtype=dtype)


def layer_norm_gradient(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    memory_efficient: bool,
) -> list[Tensor]:
    """layer_norm_gradient_affine: gradients of input, weight and bias."""
    _checked(input_or_output, shape, dout, invvar, weight, bias)
    made = [torch.empty_like(input_or_output)]
    if weight is not None and bias is not None:
        made += [torch.empty_like(weight), torch.empty_like(bias)]
        _sum_in_parts(input_or_output, weight, 2)
    return made


def rms_norm_gradient(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    shape: Shape,
    weight: Tensor | None,
    eps: float,
    memory_efficient: bool,
) -> list[Tensor]:
    """rms_norm_gradient_affine: gradients of input and weight."""
    _checked(input_or_output, shape, dout, invvar, weight)
    made = [torch.empty_like(input_or_output)]
    if weight is not None:
        made.append(torch.empty_like(weight))
        _sum_in_parts(input_or_output, weight, 1)
    return made


def _sum_in_parts(input: Tensor, weight: Tensor, count: int) -> None:
    """part_grad_gamma and part_grad_beta, freed newest first."""
    size = (_PARTS, weight.numel())
    parts = [input.new_empty(size, dtype=_wide(input.dtype)) for _ in range(count)]
    while parts:
        parts.pop()


def _without_weights(gradient: Callable[..., list[Tensor]], count: int) -> Callable[..., Tensor]:
    def call(*args: Any) -> Tensor:
        *tensors, shape, eps, memory_efficient = args
        (made,) = gradient(*tensors, shape, *[None] * count, eps, memory_efficient)
        return made

    return call


FUSED_LAYER_NORM: Mapping[str, Any] = {
    "forward_affine": compiled(layer_norm),
    "forward": compiled(lambda input, shape, eps: layer_norm(input, shape, None, None, eps)),
    "forward_affine_mixed_dtypes": compiled(lambda *args: layer_norm(*args, mixed=True)),
    "backward_affine": compiled(layer_norm_gradient),
    "backward": compiled(_without_weights(layer_norm_gradient, 2)),
    "rms_forward_affine": compiled(rms_norm),
    "rms_forward": compiled(lambda input, shape, eps: rms_norm(input, shape, None, eps)),
    "rms_forward_affine_mixed_dtypes": compiled(lambda *args: rms_norm(*args, mixed=True)),
    "rms_backward_affine": compiled(rms_norm_gradient),
    "rms_backward": compiled(_without_weights(rms_norm_gradient, 1)),
}
"""``fused_layer_norm_cuda``, by the names of its functions."""


Lists = Sequence[Sequence[Tensor]]


def _in_place(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *_: Any) -> None:
    """multi_tensor_apply: addresses ride in the arguments of the kernel, and nothing is made."""
    used("apex")
    first = tensor_lists[0]
    for tensors in tensor_lists:
        if len(tensors) != len(first):
            raise RuntimeError("tensor_lists[l].size() == len0 to be true, but got false.")
        for tensor, like in zip(tensors, first, strict=True):
            if not tensor.is_cuda:
                raise RuntimeError("A tensor was not cuda.")
            if tensor.numel() != like.numel():
                raise RuntimeError("Size mismatch")


def _l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """multi_tensor_l2norm_cuda: the norm of all, and of each if asked for."""
    _in_place(chunk_size, noop_flag, tensor_lists)
    tensors = tensor_lists[0]
    like = tensors[0]
    output = like.new_zeros(_BLOCKS, dtype=torch.float32)
    parts, of_each = None, like.new_empty(0, dtype=torch.float32)
    if per_tensor:
        chunks = max(-(-tensor.numel() // chunk_size) for tensor in tensors)
        parts = like.new_zeros(len(tensors) * chunks, dtype=torch.float32)
        of_each = like.new_empty(len(tensors), dtype=torch.float32)
    norm = like.new_empty(1, dtype=torch.float32)
    del parts, output
    return norm, of_each


def _lamb(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *_: Any) -> None:
    """multi_tensor_lamb_cuda and _lamb_mp_cuda: norms of parameters and of their updates."""
    _in_place(chunk_size, noop_flag, tensor_lists)
    of_params = _l2norm(chunk_size, noop_flag, tensor_lists[1:2], True)
    of_updates = _l2norm(chunk_size, noop_flag, tensor_lists[:1], True)
    del of_updates, of_params


def _novograd(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *_: Any) -> None:
    """multi_tensor_novograd_cuda: a norm of each gradient, into the tensor of them."""
    _in_place(chunk_size, noop_flag, tensor_lists)
    tensors = tensor_lists[0]
    like = tensors[0]
    output = like.new_empty(_BLOCKS, dtype=torch.float32)
    chunks = max(-(-tensor.numel() // chunk_size) for tensor in tensors)
    parts = like.new_zeros(len(tensors) * chunks, dtype=torch.float32)
    norm = like.new_empty(1, dtype=torch.float32)
    del norm, parts, output


AMP: Mapping[str, Any] = {
    **{
        name: compiled(_in_place)
        for name in (
            "multi_tensor_adagrad",
            "multi_tensor_adam",
            "multi_tensor_adam_capturable",
            "multi_tensor_adam_capturable_master",
            "multi_tensor_axpby",
            "multi_tensor_scale",
            "multi_tensor_sgd",
        )
    },
    "multi_tensor_l2norm": compiled(_l2norm),
    "multi_tensor_l2norm_mp": compiled(_l2norm),
    "multi_tensor_lamb": compiled(_lamb),
    "multi_tensor_lamb_mp": compiled(_lamb),
    "multi_tensor_novograd": compiled(_novograd),
}
"""``amp_C``, by the names of its functions."""
