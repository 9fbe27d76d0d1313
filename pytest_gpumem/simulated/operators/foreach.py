"""Operators on lists of tensors: additional allocations of their one-launch CUDA kernels.

Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (foreach_tensor_norm_cuda,
foreach_tensor_max_cuda), MultiTensorApply.cuh (kChunkSize) and native/ForeachUtils.h
(can_use_fast_route), torch 2.6 to 2.15. Lists of results are outputs; metadata travels as kernel
arguments. In the slow route each tensor is reduced by itself. Up to 2.14 every tensor has as many
partial results as the longest one; since 2.15 each has its own, behind a list of where they begin:
torch's own code on the dry device, with three tensors of 100,000 elements and one of 5.

The fused optimizers and the ones of GradScaler (native/cuda/FusedSgdKernel.cu, FusedAdamKernel.cu,
FusedAdagradKernel.cu, AmpKernels.cu) allocate nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES, accumulated, is_dense
from pytest_gpumem.simulated.operators.reductions import NORMS, reduce_tensor
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, passing

CHUNK = 65_536
"""Elements one block reduces."""

_OWN_CHUNKS_SINCE = (2, 15)

_FAST_ORDERS = frozenset({1, 2, math.inf})


def _is_one_launch(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0] if tensors else None
    return first is not None and all(
        tensor.dtype == first.dtype and tensor.device == first.device and is_dense(tensor)
        for tensor in tensors
    )


def _norm_is_one_launch(tensors: Sequence[Tensor], order: float) -> bool:
    return (
        order in _FAST_ORDERS
        and all(tensor.dtype.is_floating_point for tensor in tensors)
        and _is_one_launch(tensors)
    )


def _partial_results(gpu: GPU, tensors: Sequence[Tensor], itemsize: int) -> list[int]:
    """Return the sizes that are taken for partial results."""
    chunks = [-(-tensor.numel() // CHUNK) for tensor in tensors]
    if gpu.version < _OWN_CHUNKS_SINCE:
        return [len(chunks) * max(chunks) * itemsize]
    begins = len([count for count in chunks if count]) + 1
    return [begins * INDEX_BYTES, sum(chunks) * itemsize]


def _before_norm(
    gpu: GPU, self: Sequence[Tensor], ord: float, dtype: torch.dtype | None
) -> Scratch | None:
    if not _norm_is_one_launch(self, ord):
        return None
    return Scratch(gpu, *_partial_results(gpu, self, accumulated(dtype or self[0].dtype).itemsize))


def _after_norm(gpu: GPU, self: Sequence[Tensor], ord: float) -> None:
    if not _norm_is_one_launch(self, ord):
        for tensor in self:
            reduce_tensor(gpu, tensor, None, NORMS)


def _before_max(gpu: GPU, self: Sequence[Tensor]) -> Scratch | None:
    if not _is_one_launch(self):
        return None
    return Scratch(gpu, *_partial_results(gpu, self, self[0].element_size())[:-1])


def _after_max(gpu: GPU, self: Sequence[Tensor]) -> None:
    if _is_one_launch(self):
        passing(gpu, _partial_results(gpu, self, self[0].element_size())[-1])


RULES = {
    "_foreach_norm _foreach_powsum": Rule(before=_before_norm, after=_after_norm),
    "_foreach_max": Rule(before=_before_max, after=_after_max),
}
