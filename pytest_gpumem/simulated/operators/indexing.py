"""Indexing by numbers and masks, scattering, reducing by index or segment.

Source: aten/src/ATen/native/cuda/Indexing.cu (index_put_with_sort_kernel, computeLinearIndex),
Nonzero.cu (nonzero_cuda_out_impl), native/TensorAdvancedIndexing.cpp (_index_put_impl_, make_info),
native/TensorCompare.cpp (where), torch/csrc/utils/tensor_new.cpp (indexing_tensor_from_data).

Scattering and reducing: native/TensorAdvancedIndexing.cpp (scatter_reduce_two), SegmentReduce.cpp,
cuda/Indexing.cu (index_reduce_func_cuda_impl), cuda/SegmentReduce.cu (_segment_reduce_lengths_ and
_offsets_cuda_kernel) and cuda/UnfoldBackwardKernel.cu, of torch 2.6 to 2.15; the order of frees is
that of torch 2.6, 2.13 and 2.15 on the dry device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.storages import Storages
from pytest_gpumem.simulated.operators import cub, reductions
from pytest_gpumem.simulated.operators.comparisons import BOTH_EXTREMES_SINCE, count_set
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES, copied
from pytest_gpumem.simulated.operators.rules import (
    Composite,
    Rule,
    Scratch,
    borrow,
    copies_of,
    decompose,
)

_aten = torch.ops.aten
_FLAGS = frozenset({torch.bool, torch.uint8})
_Indices = Sequence[Tensor | None]
_LEAST_REPEAT_SINCE = (2, 15)
"""Until then the host asks whether all repeats are positive, since then for the least of them."""


def _converted(gpu: GPU, scratch: Scratch, given: list[Tensor]) -> Scratch:
    """Allocate as make_info: indices of the CPU or of 32 bits become 64-bit ones on the device."""
    if not given or any(index.dtype in _FLAGS for index in given):
        return scratch
    count = torch.broadcast_shapes(*(index.shape for index in given)).numel()
    for index in given:
        if _home(gpu, index) is not gpu:
            scratch.take(count * index.element_size())
        if _on_cpu(index):
            gpu.copies()
    for index in given:
        if index.dtype == torch.int32:
            scratch.take(count * INDEX_BYTES)
    _in_step(gpu, scratch, given)
    return scratch


def _in_step(gpu: GPU, scratch: Scratch, given: list[Tensor]) -> None:
    """Allocate as AdvancedIndex: indices that are broadcast differently become contiguous."""
    if len(given) < 2:
        return
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    dense = make_contiguous_strides_for(shape)
    strides = []
    for index in given:
        own = [
            0 if size == 1 else step for size, step in zip(index.shape, index.stride(), strict=True)
        ]
        is_moved = index.dtype == torch.int32 or _home(gpu, index) is not gpu
        strides.append(dense if is_moved else (*[0] * (len(shape) - index.dim()), *own))
    if len(set(strides)) == 1:
        return
    for each in strides:
        compared = zip(shape, each, dense, strict=True)
        if any(size != 1 and step != wanted for size, step, wanted in compared):
            scratch.take(shape.numel() * INDEX_BYTES)


def _given(gpu: GPU, indices: _Indices) -> list[Tensor]:
    given = [index for index in indices if index is not None]
    for index in given:
        # A list of numbers became a tensor on the indexed tensor's device, unseen by the mode.
        if not _on_cpu(index) and gpu.simulation.storages.of(index) is None:
            gpu.simulation.storages.track(index, gpu)
            gpu.copies()
    return given


def _on_cpu(index: Tensor) -> bool:
    return not raw.is_meta(index)


def _home(gpu: GPU, index: Tensor) -> GPU | None:
    """Return the GPU that an index is on, ``None`` for the host."""
    record = gpu.simulation.storages.of(index)
    return None if record is None else gpu.simulation.device(record.device.index)


def _moved(gpu: GPU, indices: _Indices, values: Tensor, accumulate: bool) -> Scratch:
    """Allocate what an index_put brings to the GPU; a result has been copied before."""
    storages = gpu.simulation.storages
    if is_masked_fill(storages, indices, values, accumulate):
        return Scratch(gpu)
    given = _given(gpu, indices)
    scratch = Scratch(gpu, values.element_size() if _is_number(storages, values) else 0)
    if _on_cpu(values):
        gpu.copies()
    return scratch if is_sorted(values, accumulate) else _converted(gpu, scratch, given)


def _is_number(storages: Storages, values: Tensor) -> bool:
    # A number, as in x[i] = 1.0, is a tensor that holds no CUDA memory.
    return not values.dim() and storages.of(values) is None


def is_masked_fill(
    storages: Storages, indices: _Indices, values: Tensor, accumulate: bool = False
) -> bool:
    """Return whether an index_put fills a mask with a number: canDispatchToMaskedFill."""
    given = [index for index in indices if index is not None]
    is_mask = len(given) == 1 and given[0].dtype in _FLAGS
    return is_mask and not accumulate and _is_number(storages, values)


def is_sorted(values: Tensor, accumulate: bool = False) -> bool:
    """Return whether an index_put sorts its indices: for the same sums each time."""
    return accumulate or (torch.are_deterministic_algorithms_enabled() and values.numel() > 1)


def _index_put(
    gpu: GPU,
    self: Tensor,
    indices: _Indices,
    values: Tensor,
    accumulate: bool,
    unsafe: bool = False,
) -> None:
    # autograd's own formula puts with indices marked as safe
    node = torch._C._current_autograd_node()
    in_formula = node is not None and node.name() in _PUTS
    _put_sorted(gpu, self, indices, values, accumulate, not (unsafe or in_formula))


_PUTS = frozenset({"IndexBackward0", "UnsafeIndexBackward0"})


def _put_sorted(
    gpu: GPU,
    self: Tensor,
    indices: _Indices,
    values: Tensor,
    accumulate: bool,
    are_checked: bool = True,
) -> None:
    """Allocate as index_put_with_sort_kernel does, step by step."""
    moved = _moved(gpu, indices, values, accumulate)
    given = _given(gpu, indices)
    # It is not known which elements a mask selects, and so not how many indices there are.
    if not given or any(index.dtype in _FLAGS for index in given):
        return
    if not is_sorted(values, accumulate):
        return
    scratch = Scratch(gpu, *copied(self))
    widened = [
        scratch.take(index.numel() * INDEX_BYTES)
        for index in given
        if index.dtype == torch.int32 and not _on_cpu(index)
    ]
    # computeLinearIndex: the sum of the indices, each wrapped and times its stride.
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    count = shape.numel()
    for at, index in enumerate(given):
        home = _home(gpu, index)
        if are_checked and count and home is not None:
            _check(home, count, is_copied=index.shape != shape or not index.is_contiguous())
        # An index is wrapped and scaled where it is, and then copied to the device.
        wrapped = scratch.take(count * INDEX_BYTES) if home is gpu else 0
        if home is not None and home is not gpu:
            borrow(home, count * INDEX_BYTES, count * INDEX_BYTES)
        scaled = scratch.take(count * INDEX_BYTES)
        if home is None:
            gpu.copies()
        scratch.drop(wrapped, *[scaled] * bool(at))
    scratch.drop(*widened)
    places = [at for at, index in enumerate(indices) if index is not None]
    slices = self.numel() // max(math.prod(self.shape[place] for place in places), 1)
    wanted = count * slices
    if values.numel() != wanted or not values.is_contiguous():
        scratch.take(wanted * self.element_size())
    if not wanted:
        return
    for _ in ("sorted", "original", "range"):
        scratch.take(count * INDEX_BYTES)
    bits = cub.bits_of(self.numel() // math.prod(self.shape[places[-1] + 1 :]) - 1)
    capability = gpu.model.compute_capability
    borrow(gpu, cub.radix_sort_pairs_bytes(count, INDEX_BYTES, INDEX_BYTES, bits, capability))
    scratch.free()
    moved.free()


def _check(gpu: GPU, count: int, *, is_copied: bool) -> None:
    """Allocate as wrapIndexOnce: the extremes of an index are compared with the size."""
    both = gpu.version >= BOTH_EXTREMES_SINCE
    for comparisons in (2,) if both else (1, 1):
        kind = reductions.TWO_VALUES if both else reductions.VALUES
        with Scratch(gpu, *[INDEX_BYTES] * comparisons):
            with Scratch(gpu, count * INDEX_BYTES if is_copied else 0):
                reductions.reduce(gpu, (count,), (1,), torch.int64, None, kind)
            for _ in range(comparisons):
                borrow(gpu, 1)


def _where(gpu: GPU, self: Tensor, other: Tensor) -> Scratch:
    scratch = Scratch(gpu)
    result = torch.result_type(self, other)
    for tensor in (self, other):
        if not tensor.dim() and raw.is_meta(tensor):
            # A number has become a tensor of no dimensions on the condition's device.
            gpu.simulation.storages.track(tensor, gpu)
        elif not tensor.dim() and tensor.dtype == result:
            scratch.take(tensor.element_size())
        if _on_cpu(tensor):
            gpu.copies()
        if tensor.dtype != result:
            scratch.take(tensor.numel() * result.itemsize)
    return scratch


def _place_set(gpu: GPU, self: Tensor) -> None:
    if self.dim():
        capability = gpu.model.compute_capability
        borrow(gpu, cub.flagged_bytes(self.numel(), capability, gpu.version))


def _scattered_by_mask(gpu: GPU, result: Tensor, mask: Tensor, source: Tensor) -> None:
    """Allocate for masked_scatter__cuda (cuda/IndexKernel.cpp): how many are set before each."""
    count = result.numel()
    if not count:
        return
    scratch = Scratch(gpu, count * INDEX_BYTES)
    scratch.take(*copied(mask.expand(result.shape)))
    borrow(gpu, cub.scan_bytes(count, INDEX_BYTES, gpu.version))
    scratch.take(*copied(source))


def _before_repeats(gpu: GPU, repeats: Tensor, output_size: int | None) -> Scratch | None:
    """Allocate for repeat_interleave_common (native/Repeat.h): the ends of repeated elements."""
    count = repeats.numel()
    if not count:
        return None
    scratch = Scratch(gpu, count * INDEX_BYTES)
    widened = count * INDEX_BYTES if repeats.dtype == torch.int32 else 0
    borrow(gpu, widened, cub.scan_bytes(count, INDEX_BYTES, gpu.version))
    if output_size is None and gpu.version >= _LEAST_REPEAT_SINCE:
        borrow(gpu, INDEX_BYTES, is_read=True)
    elif output_size is None:
        with Scratch(gpu, count):
            reductions.reduce(gpu, (count,), (1,), torch.bool, None, reductions.VALUES)
            borrow(gpu, 1, is_read=True)
    return scratch


# Scattering, and reducing by index or segment.


def _scattered_mean(gpu: GPU, src: Tensor, reduce: str, result: Tensor) -> None:
    """Allocate ones like the source, the counts that they add up to, and a mask of zero counts."""
    if reduce != "mean" or not src.numel():
        return
    borrow(gpu, src.nbytes, result.nbytes, result.numel())


def _mean_by_index(gpu: GPU, source: Tensor, reduce: str, result: Tensor) -> None:
    if reduce == "mean":
        with Scratch(gpu, result.nbytes):
            borrow(gpu, source.nbytes)
            borrow(gpu, result.numel())


def _made_twice(gpu: GPU, result: Tensor) -> Iterator[Tensor]:
    """Yield rows whose place was taken before (_fbgemm_dense_to_jagged_forward_symint)."""
    with Scratch(gpu, result.nbytes):
        yield result


def _before_segments(
    gpu: GPU, data: Tensor, lengths: Tensor | None, offsets: Tensor | None, unsafe: bool
) -> Scratch:
    """Copy; allocate for the check that lengths are not negative, and add up to the whole."""
    copies = Scratch(gpu, *copied(data))
    if offsets is None and lengths is not None and not unsafe:
        borrow(gpu, lengths.element_size(), is_read=True)
        rows = max(lengths.numel() // max(lengths.shape[-1], 1), 1)
        borrow(gpu, rows * INDEX_BYTES, rows, 1, is_read=True)
    copies.take(*copied(lengths if offsets is None else offsets))
    return copies


def _segments(
    gpu: GPU,
    lengths: Tensor | None,
    offsets: Tensor | None,
    data: Tensor,
    grad: Tensor | None = None,
) -> None:
    """Allocate lengths or offsets, whichever is not given; CUB reduces the segments of a row."""
    of_a_row = grad is None and data.dim() == 1
    if lengths is None:
        if offsets is not None:
            rows = offsets.numel() // max(offsets.shape[-1], 1)
            borrow(gpu, (offsets.numel() - rows) * offsets.element_size(), *[1] * of_a_row)
        return
    size = lengths.element_size()
    rows = lengths.numel() // max(lengths.shape[-1], 1)
    scratch = Scratch(gpu)
    first = scratch.take(rows * size)
    scratch.take((lengths.numel() + rows) * size)
    scratch.drop(first)
    if rows == 1:
        borrow(gpu, cub.scan_bytes(lengths.numel() + 1, size, gpu.version))
    if of_a_row:
        borrow(gpu, 1)


def _unfold_backward(
    gpu: GPU, input_sizes: Sequence[int], dim: int, size: int, step: int, result: Tensor
) -> None:
    """Allocate for adding up overlapping windows by where they begin."""
    if step < size and input_sizes and result.numel():
        borrow(gpu, input_sizes[dim] * INDEX_BYTES)


def one_hot(self: Tensor, num_classes: int) -> Tensor:
    """Run ``aten::one_hot`` (native/Onehot.cpp), which scatters into zeros, unlike on ``meta``."""
    is_counted = num_classes == -1 and self.numel() > 0
    if self.dtype != torch.int64 or not (is_counted or num_classes > 0):
        return decompose(_aten.one_hot.default, self, num_classes)
    if is_counted:
        num_classes = int(self.max().item()) + 1
    result = torch.zeros((*self.shape, num_classes), dtype=self.dtype, device=self.device)
    return result.scatter_(-1, self.unsqueeze(-1), 1)


def _before_fill(gpu: GPU, value: Tensor | float) -> None:
    """Make the host wait for a number that is on the GPU."""
    if isinstance(value, Tensor) and value.is_cuda:
        gpu.waits()


def _filled(fill: Composite, gpu: GPU, self: Tensor, mask: Tensor, value: Tensor) -> object:
    _before_fill(gpu, value)
    return fill(self, mask, 0)


ABOVE_AUTOGRAD: dict[str, Composite] = {"aten.one_hot.default": one_hot}

BELOW_AUTOGRAD: dict[str, Composite] = {
    # Of a tensor of no dimensions CUDA reads the number from any device.
    "aten.masked_fill.Tensor": partial(_filled, _aten.masked_fill.Scalar),
    "aten.masked_fill_.Tensor": partial(_filled, _aten.masked_fill_.Scalar),
}

RULES = {
    "index _unsafe_index": Rule(
        before=lambda gpu, indices: _converted(gpu, Scratch(gpu), _given(gpu, indices))
    ),
    "_padded_dense_to_jagged_forward": Rule(outputs=_made_twice),
    "_unsafe_index_put": Rule(after=_put_sorted),
    "index_put_ index_put _index_put_impl_": Rule(after=_index_put),
    "nonzero": Rule(before=count_set, after=_place_set),
    "where": Rule(before=_where),
    "index_fill index_fill_": Rule(before=_before_fill),
    "masked_scatter masked_scatter_": Rule(after=_scattered_by_mask),
    "repeat_interleave": Rule(before=_before_repeats),
    "scatter_reduce scatter_reduce_": Rule(after=_scattered_mean),
    "index_reduce index_reduce_": Rule(after=_mean_by_index),
    "segment_reduce": Rule(before=_before_segments, after=_segments),
    "_segment_reduce_backward": Rule(
        before=copies_of("grad", "output", "data", "lengths", "offsets"), after=_segments
    ),
    "unfold_backward": Rule(after=_unfold_backward),
}
