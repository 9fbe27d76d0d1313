"""Reductions over many elements: partial results of several blocks, and their semaphores.

Source: aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, gpu_reduce_kernel) of torch 2.6 and
2.15, TensorIterator.cpp (reorder_dimensions, coalesce_dimensions, get_dim_to_split), ReduceOps.cpp
and ReduceOpsUtils.h (make_reduction_from_out_ty, count_nonzero_cuda, argmax_argmin_impl), and for
the type a kernel accumulates in ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu,
ReduceLogicKernel.cu, ReduceArgMaxKernel.cu, ReduceMaxValuesKernel.cu, ReduceAMinMaxKernel.cu;
native/ReduceAllOps.cpp (max, min), of torch 2.6 to 2.15.

Lists of tensors are reduced in one launch: ForeachReduceOp.cu (foreach_tensor_norm_cuda,
foreach_tensor_max_cuda), MultiTensorApply.cuh (kChunkSize) and native/ForeachUtils.h
(can_use_fast_route), torch 2.6 to 2.15. Lists of results are outputs; metadata travels as kernel
arguments. In the slow route each tensor is reduced by itself. Up to 2.14 every tensor has as many
partial results as the longest one; since 2.15 each has its own, after a list of their beginnings:
torch's own code on the dry device, with three tensors of 100,000 elements and one of 5.

The fused optimizers and the ones of GradScaler (native/cuda/FusedSgdKernel.cu, FusedAdamKernel.cu,
FusedAdagradKernel.cu, AmpKernels.cu) allocate nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.operators.layout import (
    HALF_DTYPES,
    INDEX_BYTES,
    INDEXABLE,
    accumulated,
    copied,
    is_dense,
)
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, borrow

Dims = tuple[int, ...]
Over = Sequence[int] | int | None
"""The dims that are reduced; all: ``None``."""

MIN_VALUES, MAX_VALUES = 16, 256
"""Values one thread reduces before, and at most without, splitting over blocks."""


_Dim = tuple[int, int, bool]
"""Size, stride of the input in elements, whether it is reduced."""


def _configured(
    dims: Sequence[_Dim],
    element_bytes: int,
    accumulated_bytes: int,
    sm_count: int,
    threads_per_sm: int,
) -> tuple[int, int] | None:
    """Return bytes of buffer and semaphores by setReduceConfig of ``dims``, reduced ones first."""
    outputs = math.prod(size for size, _, is_reduced in dims if not is_reduced)
    per_output = math.prod(size for size, _, is_reduced in dims if is_reduced)
    reduced_dims = sum(1 for _, _, is_reduced in dims if is_reduced)
    if not reduced_dims:
        return None

    first_kept = dims[reduced_dims][1] if reduced_dims < len(dims) else None
    fast = first_kept is None or dims[0][1] < first_kept
    dim0, dim1 = (per_output, outputs) if fast else (outputs, per_output)
    output_vector = 1
    if not fast and first_kept == 1:
        output_vector = _output_vector(dims, reduced_dims)
        dim0 //= output_vector

    limit = (256 if element_bytes == 16 else 512) // output_vector
    width0, height0 = min(power_below(dim0), limit), min(power_below(dim1), limit)
    width = min(width0, 32)
    height = min(height0, limit // width)
    width = min(width0, limit // height)

    inputs_step, outputs_step = (width, 1) if fast else (1, width)
    if -(-per_output // inputs_step) < min(height * 16, MAX_VALUES):
        return None
    inputs_step *= height
    values = -(-per_output // inputs_step)
    grid = -(-(outputs // output_vector) // outputs_step)
    target = sm_count * (threads_per_sm // (width * height))
    if values < MAX_VALUES or grid > target:
        return None
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if blocks <= 1:
        return None
    buffer = accumulated_bytes * outputs * blocks
    return (buffer if fast else buffer * width * output_vector), 4 * grid


def power_below(value: int) -> int:
    """Return the largest power of two that is not above ``value``: ``last_pow2``."""
    return 1 << (max(value, 1).bit_length() - 1)


def _coalesced(shape: Dims, strides: Dims, reduced: frozenset[int]) -> list[_Dim]:
    # The output's strides decide first (0 where reduced), then the input's; a dim of size 1 or a
    # broadcast one ties.
    dims = [(n, s, i in reduced) for i, (n, s) in enumerate(zip(shape, strides, strict=True))]
    ordered: list[_Dim] = []
    for dim in reversed(dims):
        place = len(ordered)
        for at in range(len(ordered) - 1, -1, -1):
            comparison = _compare(ordered[at], dim)
            if comparison > 0:
                place = at
            elif comparison < 0:
                break
        ordered.insert(place, dim)
    merged: list[_Dim] = []
    for size, stride, is_reduced in ordered:
        if merged:
            size0, stride0, reduced0 = merged[-1]
            joins = stride == size0 * stride0 and is_reduced == reduced0
            if size == 1 or joins:
                merged[-1] = (size0 * size, stride0, reduced0)
                continue
            if size0 == 1:
                merged[-1] = (size, stride, is_reduced)
                continue
        merged.append((size, stride, is_reduced))
    return [dim for dim in merged if dim[0] != 1]


def _compare(one: _Dim, other: _Dim) -> int:
    if one[2] != other[2]:
        return -1 if one[2] else 1
    if not one[1] or not other[1]:
        return 0
    if one[1] != other[1]:
        return -1 if one[1] < other[1] else 1
    return 1 if one[0] > other[0] else 0


def _output_vector(dims: Sequence[_Dim], reduced_dims: int) -> int:
    vector = 4
    while vector > 1 and (
        dims[reduced_dims][0] % vector
        or any(stride % vector for at, (_, stride, _) in enumerate(dims) if at != reduced_dims)
    ):
        vector //= 2
    return vector


def _indexable_parts(dims: list[_Dim], element_bytes: int) -> Iterator[list[_Dim]]:
    """Yield the parts of with_32bit_indexing: halves of the dim of the largest extent in bytes."""
    extents = [(size - 1) * abs(stride) * element_bytes for size, stride, _ in dims]
    if math.prod(size for size, _, _ in dims) <= INDEXABLE and 1 + sum(extents) <= INDEXABLE:
        yield dims
        return
    # The last of equal extents is found first.
    at = max(range(len(dims)), key=lambda dim: (extents[dim], dim))
    size, stride, is_reduced = dims[at]
    for part in (size // 2, size - size // 2):
        halves = [*dims[:at], (part, stride, is_reduced), *dims[at + 1 :]]
        yield from _indexable_parts(halves, element_bytes)


@lru_cache(maxsize=4096)
def launches(
    shape: Dims,
    strides: Dims,
    reduced: Dims,
    element_bytes: int,
    accumulated_bytes: int,
    sm_count: int,
    threads_per_sm: int,
) -> tuple[tuple[int, int] | None, ...]:
    """Return the bytes of buffer and semaphores of each launch, one for each part of 32 bits.

    ``None`` if each output has its own block. ``strides`` are in elements. How many values a thread
    loads at once (input_vec_size, by kernel and release) does not enter: a sum that several blocks
    share has at least 8192 addends, and its blocks are as wide as they can be for any vector.
    """
    dims = _coalesced(shape, strides, frozenset(reduced))
    return tuple(
        _configured(part, element_bytes, accumulated_bytes, sm_count, threads_per_sm)
        for part in _indexable_parts(dims, element_bytes)
    )


# The rules, operator by operator.


@dataclass(frozen=True)
class Accumulator:
    """The accumulator of a kernel."""

    nbytes: Callable[[torch.dtype], int]
    """Type of the input as the kernel reads it -> bytes of one partial result."""
    in_output: bool = True
    """Whether it converts to the output's type (16-bit sums do not: they would lose digits)."""


def _sum_bytes(dtype: torch.dtype) -> int:
    return accumulated(dtype).itemsize


SUMS = Accumulator(_sum_bytes)
NORMS = Accumulator(
    lambda dtype: dtype.to_real().itemsize if dtype.is_complex else _sum_bytes(dtype)
)
VALUES = Accumulator(lambda dtype: dtype.itemsize)
_TRUTH = Accumulator(lambda dtype: 1)
TWO_VALUES = Accumulator(lambda dtype: 2 * dtype.itemsize, in_output=False)
VALUE_AND_INDEX = Accumulator(lambda dtype: 16, in_output=False)
# WelfordData: mean, m2, n, nf.
MOMENTS = Accumulator(lambda dtype: 32 if dtype == torch.float64 else 16, in_output=False)


def reduce(
    gpu: GPU,
    shape: Dims,
    strides: Dims,
    dtype: torch.dtype,
    dims: Over,
    accumulator: Accumulator,
    result: torch.dtype | None = None,
) -> None:
    """Allocate and free the memory of reducing a tensor over ``dims`` (all: ``None``).

    ``dtype`` is the type that the kernel reads, ``result`` the one it writes, by default the same.
    """
    elements, rank = math.prod(shape), len(shape)
    if elements < MAX_VALUES * 32:
        return
    reduced = _reduced(rank, dims)
    partial_bytes = accumulator.nbytes(dtype)
    model = gpu.model
    processors = model.sm_count, model.max_threads_per_sm
    found = launches(shape, strides, reduced, dtype.itemsize, partial_bytes, *processors)
    if found == (None,):
        return
    scratch = Scratch(gpu)
    if len(found) > 1:
        # Parts of one output are added up in a buffer where the output's type would lose digits.
        is_same = result in (None, dtype)
        is_buffered = not accumulator.in_output or (is_same and dtype in HALF_DTYPES)
        if is_buffered and (result or dtype).itemsize < partial_bytes:
            outputs = elements // math.prod(shape[d] for d in reduced)
            scratch.take(outputs * partial_bytes)
    for sizes in found:
        if sizes is not None:
            borrow(gpu, *sizes)


def _reduced(rank: int, dims: Over) -> Dims:
    if isinstance(dims, int):
        dims = (dims,)
    return tuple([dim % rank for dim in dims]) if dims and rank else tuple(range(rank))


def outputs_of(tensor: Tensor, dims: Over) -> int:
    """Return the number of results of reducing ``tensor`` over ``dims``."""
    reduced = _reduced(tensor.dim(), dims)
    return math.prod(size for dim, size in enumerate(tensor.shape) if dim not in reduced)


def reduce_tensor(
    gpu: GPU, tensor: Tensor, dims: Over, kind: Accumulator, result: torch.dtype | None = None
) -> None:
    """Call :func:`reduce` for ``tensor`` as it is, by default to its own type."""
    reduce(gpu, tuple(tensor.shape), tensor.stride(), tensor.dtype, dims, kind, result)


def _sum(gpu: GPU, self: Tensor, result: Tensor, dim: Over = None) -> None:
    """Allocate for a sum: but from 16 bits to 32, the input is converted to the result's type."""
    if self.dtype == result.dtype or (self.dtype in HALF_DTYPES and result.dtype == torch.float32):
        reduce_tensor(gpu, self, dim, SUMS, result.dtype)
    else:
        _converted_sum(gpu, self, result, dim)


def _converted_sum(gpu: GPU, self: Tensor, result: Tensor, dim: Over) -> None:
    with Scratch(gpu, self.numel() * result.element_size()):
        reduce(gpu, tuple(self.shape), self.stride(), result.dtype, dim, SUMS)


def _position(gpu: GPU, self: Tensor, dim: int | None, result: Tensor) -> None:
    if dim is not None:
        reduce_tensor(gpu, self, dim, VALUE_AND_INDEX, result.dtype)
        return
    row = self.reshape(-1)
    is_copied = storage_key(row) != storage_key(self)
    with Scratch(gpu, self.nbytes if is_copied else 0):
        reduce_tensor(gpu, row, 0, VALUE_AND_INDEX, result.dtype)


def _of_all_or_along(
    whole: Accumulator, along: Accumulator, gpu: GPU, self: Tensor, result: Any, dim: Over = None
) -> None:
    """Allocate to reduce along ``dim``, or all elements."""
    if dim is None:
        reduce_whole(gpu, self, whole)
    else:
        first = result if isinstance(result, Tensor) else result[0]
        reduce_tensor(gpu, self, dim, along, first.dtype)


def reduce_whole(gpu: GPU, tensor: Tensor, kind: Accumulator) -> None:
    """Allocate for the extremes of all elements, whose kernels read a row (max_all, aminmax)."""
    with Scratch(gpu, *copied(tensor)):
        reduce(gpu, (tensor.numel(),), (1,), tensor.dtype, 0, kind)


def _truth(gpu: GPU, self: Tensor, result: Tensor, dim: Over = None) -> None:
    if self.numel() == 1 and self.dtype != torch.bool:
        borrow(gpu, 1)  # allany_impl: result.copy_(self.view_as(result).to(kBool))
    else:
        reduce_tensor(gpu, self, dim, _TRUTH, result.dtype)


# Lists of tensors.

CHUNK = 65_536
"""Elements one block reduces."""

_OWN_CHUNKS_SINCE = (2, 15)

_FAST_ORDERS = frozenset({1, 2, math.inf})


def _is_one_launch(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and all(
        (tensor.dtype, tensor.device) == (tensors[0].dtype, tensors[0].device) and is_dense(tensor)
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
        borrow(gpu, _partial_results(gpu, self, self[0].element_size())[-1])


def _sums_of_rows(gpu: GPU, self: Tensor) -> None:
    """Allocate for _s_dirichlet_cuda (Distributions.cpp): numbers are divided by sums of rows."""
    with Scratch(gpu, self.nbytes // max(self.shape[-1], 1)):
        reduce_tensor(gpu, self, (-1,), SUMS)


RULES = {
    "_sample_dirichlet": Rule(after=_sums_of_rows),
    "sum nansum mean prod": Rule(after=_sum),
    "argmax argmin": Rule(after=_position),
    "max min": Rule(after=partial(_of_all_or_along, VALUES, VALUE_AND_INDEX)),
    "amax amin": Rule(
        after=lambda gpu, self, dim, result: reduce_tensor(gpu, self, dim, VALUES, result.dtype)
    ),
    "aminmax": Rule(after=partial(_of_all_or_along, TWO_VALUES, TWO_VALUES)),
    "any all": Rule(after=_truth),
    # (self != 0).sum(dim), but of truth, which is summed as it is
    "count_nonzero": Rule(
        before=lambda gpu, self: Scratch(gpu, 0 if self.dtype == torch.bool else self.numel()),
        after=_converted_sum,
    ),
    "trace": Rule(after=lambda gpu, self, result: _sum(gpu, self.diagonal(), result)),
    "_foreach_norm _foreach_powsum": Rule(before=_before_norm, after=_after_norm),
    "_foreach_max": Rule(before=_before_max, after=_after_max),
}
