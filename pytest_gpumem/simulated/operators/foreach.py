"""Operators on lists of tensors: what their one-launch CUDA kernels allocate in addition.

Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (foreach_tensor_norm_cuda) and
MultiTensorApply.cuh (kChunkSize). Lists of results are outputs; metadata travels as kernel
arguments.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.operators.rules import Rule, Scratch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.device import SimulatedGPU

CHUNK = 65_536
"""Elements one block reduces."""

_FAST_ORDERS = frozenset({1, 2, math.inf})
_HALVES = frozenset({torch.float16, torch.bfloat16})


def _norm(gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    tensors = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if not tensors or float(order) not in _FAST_ORDERS:
        return None
    dtype = tensors[0].dtype
    if not dtype.is_floating_point or any(
        tensor.dtype != dtype or not tensor.numel() for tensor in tensors
    ):
        return None
    chunks = max(-(-tensor.numel() // CHUNK) for tensor in tensors)
    partial = Scratch(gpu)
    partial.take(len(tensors) * chunks * (4 if dtype in _HALVES else dtype.itemsize))
    return partial


RULES = {"aten::_foreach_norm": Rule(before=_norm)}
