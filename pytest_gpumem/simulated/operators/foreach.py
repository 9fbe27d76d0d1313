"""Operators on lists of tensors: what their one-launch CUDA kernels allocate in addition.

Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (foreach_tensor_norm_cuda,
foreach_tensor_max_cuda), MultiTensorApply.cuh (kChunkSize) and native/ForeachUtils.h
(can_use_fast_route), torch 2.6 to 2.15. Lists of results are outputs; metadata travels as kernel
arguments. In the slow route each tensor is reduced by itself.

The fused optimizers and the ones of GradScaler (native/cuda/FusedSgdKernel.cu, FusedAdamKernel.cu,
FusedAdagradKernel.cu, AmpKernels.cu) allocate nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.operators.layout import is_dense
from pytest_gpumem.simulated.operators.reductions import sum_of_all
from pytest_gpumem.simulated.operators.rules import Rule, Scratch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import GPU

CHUNK = 65_536
"""Elements one block reduces."""

_FAST_ORDERS = frozenset({1, 2, math.inf})
_HALVES = frozenset({torch.float16, torch.bfloat16})


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _is_one_launch(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    return all(
        tensor.dtype == first.dtype and tensor.device == first.device and is_dense(tensor)
        for tensor in tensors
    )


def _norm_is_one_launch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (
        _order(args, kwargs) in _FAST_ORDERS
        and all(tensor.dtype.is_floating_point for tensor in args[0])
        and _is_one_launch(args[0])
    )


def _partial_results(gpu: GPU, tensors: Sequence[torch.Tensor], itemsize: int) -> Scratch:
    chunks = max(-(-tensor.numel() // CHUNK) for tensor in tensors)
    partial = Scratch(gpu)
    partial.take(len(tensors) * chunks * itemsize)
    return partial


def _before_norm(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    if not args[0] or not _norm_is_one_launch(args, kwargs):
        return None
    dtype = (args[2] if len(args) > 2 else kwargs.get("dtype")) or args[0][0].dtype
    return _partial_results(gpu, args[0], 4 if dtype in _HALVES else dtype.itemsize)


def _after_norm(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if not _norm_is_one_launch(args, kwargs):
        for tensor in args[0]:
            sum_of_all(gpu, tensor)


def _before_max(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    if not args[0] or not _is_one_launch(args[0]):
        return None
    return _partial_results(gpu, args[0], args[0][0].element_size())


RULES = {
    "aten::_foreach_norm": Rule(before=_before_norm, after=_after_norm),
    "aten::_foreach_powsum": Rule(before=_before_norm, after=_after_norm),
    "aten::_foreach_max": Rule(before=_before_max),
}


def _writes_only(*args: Any, **kwargs: Any) -> None:
    """The shape of an operator that returns nothing."""


SHAPES: dict[str, Callable[..., Any]] = dict.fromkeys(
    (
        "_fused_sgd_",
        "_fused_sgd_.tensor_lr",
        "_fused_adagrad_",
        "_fused_adagrad_.tensor_lr",
        "_fused_adam_.tensor_lr",
        "_fused_adamw_.tensor_lr",
    ),
    _writes_only,
)
"""By operator name: kernels for ``meta`` that torch does not have."""
