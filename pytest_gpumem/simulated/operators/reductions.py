"""Reductions over many elements: partial results of several blocks, and their semaphores.

Source: aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, ReduceConfig, gpu_reduce_kernel) of
torch 2.6 and 2.15, TensorIterator.cpp (reorder_dimensions, coalesce_dimensions), and for the type a
kernel accumulates in ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu,
ReduceLogicKernel.cu, ReduceArgMaxKernel.cu, ReduceMaxValuesKernel.cu, ReduceAMinMaxKernel.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.operators.rules import Rule, passing

if TYPE_CHECKING:
    from pytest_gpumem.simulated.device import SimulatedGPU

Dims = tuple[int, ...]

MIN_VALUES, MAX_VALUES = 16, 256
"""Values one thread reduces before, and at most without, splitting over blocks."""
_INDEXABLE = 2**31 - 1


@lru_cache(maxsize=4096)
def global_reduction_bytes(
    shape: Dims,
    strides: Dims,
    reduced: Dims,
    element_bytes: int,
    accumulated_bytes: int,
    sm_count: int,
    threads_per_sm: int,
    values_per_load: int = 4,
    old_vectors: bool = False,
) -> tuple[int, int] | None:
    """Bytes of the buffer and of the semaphores; ``None`` if each output has its own block.

    ``strides`` are in elements; ``values_per_load`` is the kernel's ``vt0``; ``old_vectors`` is the
    condition for vectorised loads up to torch 2.6.
    """
    dims = _coalesced(shape, strides, frozenset(reduced))
    elements = 1
    for size in shape:
        elements *= size
    outputs = 1
    for size, _, is_reduced in dims:
        outputs *= 1 if is_reduced else size
    per_output = elements // outputs
    reduced_dims = sum(1 for _, _, is_reduced in dims if is_reduced)
    if not dims or not reduced_dims:
        return None

    first_kept = dims[reduced_dims][1] if reduced_dims < len(dims) else None
    fast = first_kept is None or dims[0][1] < first_kept
    dim0, dim1 = (per_output, outputs) if fast else (outputs, per_output)
    output_vector = 1
    if (dims[0][1] if fast else first_kept) == 1:
        enough = dim0 > 128 and values_per_load >= 4 if old_vectors else dim0 >= 128
        if fast and enough and reduced_dims == 1:
            dim0 //= 4 if old_vectors else values_per_load
        elif not fast:
            output_vector = _output_vector(dims, reduced_dims)
            dim0 //= output_vector

    limit = (256 if element_bytes == 16 else 512) // output_vector
    width0, height0 = _power_below(dim0, limit), _power_below(dim1, limit)
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
    blocks = max(
        min(-(-target // grid), -(-values // MIN_VALUES)),
        -(-values // MAX_VALUES),
    )
    if blocks <= 1:
        return None
    buffer = accumulated_bytes * outputs * blocks
    return (buffer if fast else buffer * width * output_vector), 4 * grid


def _power_below(value: int, limit: int) -> int:
    return limit if value >= limit else 1 << (max(value, 1).bit_length() - 1)


_Dim = tuple[int, int, bool]
"""Size, stride of the input in elements, whether it is reduced."""


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


# The rules, operator by operator.

_Bytes = Callable[[torch.Tensor, torch.dtype], int]
"""Input and the type it is computed in -> bytes of what is accumulated."""

_HALVES = frozenset({torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def _sums(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    if dtype in _INTEGERS:
        return 8
    return 4 if dtype in _HALVES else dtype.itemsize


def _values(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return dtype.itemsize


def _moments(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float64 else 16  # WelfordData: mean, m2, n, nf


def _value_and_index(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return 16


def _truth(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return 1


def _two_values(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return 2 * dtype.itemsize


def reduce(
    gpu: SimulatedGPU,
    tensor: torch.Tensor,
    dims: Sequence[int] | int | None,
    accumulated: _Bytes,
    dtype: torch.dtype | None = None,
    values_per_load: int = 4,
) -> None:
    """Allocate and free what reducing ``tensor`` over ``dims`` (all: ``None``) takes."""
    if tensor.numel() < MAX_VALUES * 32:
        return
    rank = tensor.dim()
    if isinstance(dims, int):
        dims = (dims,)
    reduced = tuple(d % rank for d in dims) if dims else tuple(range(rank))
    computed = dtype or tensor.dtype
    if tensor.numel() * tensor.element_size() > _INDEXABLE:
        return
    sizes = global_reduction_bytes(
        tuple(tensor.shape),
        tensor.stride(),
        reduced,
        tensor.element_size(),
        accumulated(tensor, computed),
        gpu.model.sm_count,
        gpu.model.max_threads_per_sm,
        values_per_load,
        gpu.version < (2, 7),
    )
    if sizes is not None:
        passing(gpu, *sizes)


def _over(
    accumulated: _Bytes, at: int | None = None, dtype_at: str | None = None, vt0: int = 4
) -> Rule:
    """A rule for an operator whose dims are its argument ``at``."""

    def after(gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        tensor = args[0]
        if not isinstance(tensor, torch.Tensor) or tensor.numel() < MAX_VALUES * 32:
            return
        dims = None
        if at is not None:
            dims = args[at] if len(args) > at else kwargs.get("dim")
        dtype = kwargs.get(dtype_at) if dtype_at else None
        reduce(gpu, tensor, dims, accumulated, dtype, vt0)

    return Rule(after=after)


RULES = {
    "aten::sum": _over(_sums, 1),
    "aten::nansum": _over(_sums, 1),
    "aten::mean": _over(_sums, 1),
    "aten::prod": _over(_sums, 1),
    "aten::linalg_vector_norm": _over(_sums, 2),
    "aten::norm": _over(_sums, 2),
    "aten::var": _over(_moments, 1, vt0=2),
    "aten::std": _over(_moments, 1, vt0=2),
    "aten::var_mean": _over(_moments, 1, vt0=2),
    "aten::std_mean": _over(_moments, 1, vt0=2),
    "aten::argmax": _over(_value_and_index, 1),
    "aten::argmin": _over(_value_and_index, 1),
    "aten::max": _over(_value_and_index, 1),
    "aten::min": _over(_value_and_index, 1),
    "aten::amax": _over(_values, 1),
    "aten::amin": _over(_values, 1),
    "aten::aminmax": _over(_two_values, 1),
    "aten::any": _over(_truth, 1),
    "aten::all": _over(_truth, 1),
    "aten::count_nonzero": _over(_sums, 1),
}
