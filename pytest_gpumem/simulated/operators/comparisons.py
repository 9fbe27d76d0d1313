"""Comparisons, searches, assertions, distinct values and counts: parts, conversions and sorts.

Source: aten/src/ATen/native/cuda/Equal.cpp (cuda_equal), native/TensorCompare.cpp (isclose,
allclose, isin), cuda/TensorCompare.cu (isin_default_kernel_gpu, _assert_async_cuda),
BucketizationUtils.h (searchsorted_maybe_trim_input_tensors), Bucketization.cpp, of torch 2.6 to
2.15; cuda/UniqueCub.cu (UniqueCub, compute_unique) and SummaryOps.cu (_bincount_cuda_template,
_histc_cuda_template) of torch 2.6 to 2.15. Of CUB's storage the sorts are exact; the scans and
selections, of a state for each of many hundred elements, are estimated. ``unique(dim=...)`` sorts
by Thrust, whose storage is left out, and which waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values.views import layout_of
from pytest_gpumem.simulated.operators import cub, reductions
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES, copied
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, borrow, with_in_place


def equal_unseen(self: Tensor, other: Tensor) -> bool | None:
    """Return the result of ``torch.equal`` if that needs no values; ``None`` if it does."""
    if self.shape != other.shape:
        return False
    is_same = storage_key(self) == storage_key(other) and layout_of(self) == layout_of(other)
    return True if is_same or not self.numel() else None


def _all(each: Tensor) -> None:
    every = each.all()
    del every


def _allclose(
    self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> None:
    _all(torch.isclose(self, other, rtol, atol, equal_nan))


PARTS: dict[str, Callable[..., None]] = {
    "aten::equal": lambda self, other: _all(self == other),
    "aten::allclose": _allclose,
}
"""Functions that run the parts of an operator whose result is a Python number."""


def _isin(gpu: GPU, elements: Tensor | None = None, test_elements: Tensor | None = None) -> None:
    """Allocate for isin: few test elements are compared by eq().any(-1); many are sorted."""
    if test_elements is None:
        return
    count, others = 1 if elements is None else elements.numel(), test_elements.numel()
    if count and others < int(10 * math.pow(count, 0.145)):
        borrow(gpu, count * others, count)


def _number(gpu: GPU, self: Tensor | float, sorter: Tensor | None = None) -> Scratch | None:
    """Allocate for a number, and for the check of the places in ``sorter``."""
    scratch = None if isinstance(self, Tensor) else Scratch(gpu, 8)
    if sorter is not None and sorter.numel():
        _read_extremes(gpu, Scratch(gpu), sorter)
    return scratch


def _search(
    gpu: GPU,
    self: Tensor | float,
    sorted_sequence: Tensor | None = None,
    boundaries: Tensor | None = None,
    sorter: Tensor | None = None,
) -> None:
    sorted = boundaries if sorted_sequence is None else sorted_sequence
    assert sorted is not None
    if not sorted.numel() or (isinstance(self, Tensor) and not self.numel()):
        return
    tensor = self if isinstance(self, Tensor) else None
    scratch = Scratch(gpu, *copied(tensor, sorted, sorter))
    common = torch.result_type(sorted, self)
    number = torch.float64 if isinstance(self, float) else torch.int64
    if (number if tensor is None else tensor.dtype) != common:
        scratch.take((1 if tensor is None else tensor.numel()) * common.itemsize)
    if sorted.dtype != common:
        scratch.take(sorted.numel() * common.itemsize)


def _assert(gpu: GPU, self: Tensor) -> None:
    """Raise the error of a failed assertion; a GPU reports it at a later call of CUDA."""
    if self.numel() != 1:
        many = "more than one value" if self.numel() else "no values"
        raise RuntimeError(f"Boolean value of Tensor with {many} is ambiguous")
    known = gpu.simulation.values.known(self)
    if known is not None and not known.item():
        error: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
        raise error("CUDA error: device-side assert triggered")


_SHORT_INDEX_BYTES = 4
BOTH_EXTREMES_SINCE = (2, 12)
"""``aminmax`` in histc, multinomial and index_put; before, ``min`` and ``max`` one after the other
(tried on 2.11 and 2.13)."""
_BINS_BY_BOTH_SINCE = (2, 13)
"""``aminmax`` in bincount, whose result it outlives (2.12, 2.13 and 2.15 on the dry device)."""
_STATIC_TILE = 512 * 16
"""Elements that a block of nonzero_static_cuda_out_impl (Nonzero.cu) counts at once."""


def count_set(gpu: GPU, self: Tensor) -> Scratch:
    """Allocate to count the elements that are set; the scratch holds the number."""
    scratch = Scratch(gpu, *copied(self), 4)
    model = gpu.model
    borrow(gpu, cub.device_sum_bytes(self.numel(), model.sm_count, model.max_threads_per_sm))
    gpu.waits()
    return scratch


def _before(
    gpu: GPU, self: Tensor, return_inverse: bool, dim: int | None = None, sorted: bool | None = None
) -> Scratch | None:
    """Sort and number the distinct values, before the results are allocated.

    Equal neighbours (unique_consecutive, which has no ``sorted``) are only numbered.
    """
    if not self.numel():
        return None
    if dim is not None:
        gpu.waits(by_torch=False)
        return None
    if sorted is not None and self.dtype == torch.bool:
        return count_set(gpu, self)
    scratch = Scratch(gpu, *copied(self))
    count, size = self.numel(), self.element_size()
    if sorted is not None:
        index = INDEX_BYTES if return_inverse else 0
        scratch.take(count * size)
        indices = scratch.take(count * index)
        scratch.take(count * index)
        at = gpu.model.compute_capability, gpu.model.sm_count
        borrow(gpu, cub.radix_sort_pairs_bytes(count, size, index, 8 * size, *at))
        scratch.drop(indices)
    if return_inverse:
        # The GPU has its inverse by now; the result's is allocated later, in the room freed here.
        inverse = scratch.take(count * INDEX_BYTES)
        numbers = scratch.take(count * (_SHORT_INDEX_BYTES if sorted is None else INDEX_BYTES))
        storage = cub.scan_bytes(min(count, cub.LARGEST_SCAN), 4, gpu.version)
        scratch.drop(scratch.estimate(storage, "CUB", "a prefix sum"))
        scratch.drop(numbers, inverse)
    return scratch


_Distinct = tuple[Tensor, ...]
"""Values, the index of each element's value, and the count of each value, but of ``_unique``."""


def _placed(
    self: Tensor,
    result: _Distinct,
    return_counts: bool = False,
    dim: int | None = None,
    sorted: bool | None = None,
) -> Iterator[Tensor]:
    """Yield the results, which CUDA makes as large as the input and then shortens in place."""
    values, inverse, *rest = result
    counts = rest[0] if rest else inverse.new_empty(0)
    is_boolean = sorted is not None and self.dtype == torch.bool
    room = 2 if is_boolean else self.numel()
    if not is_boolean:
        yield inverse
    if dim is None:
        values.untyped_storage().resize_(room * values.element_size())
    yield values
    if dim is None and (is_boolean or return_counts):
        counts.untyped_storage().resize_(room * counts.element_size())
    yield counts
    yield inverse  # for booleans it is the last


def _select(gpu: GPU, self: Tensor, dim: int | None = None, sorted: bool | None = None) -> None:
    if dim is None and self.numel() and (sorted is None or self.dtype != torch.bool):
        capability = gpu.model.compute_capability
        storage = cub.unique_bytes(self.numel(), capability, gpu.version)
        scratch = Scratch(gpu, INDEX_BYTES)
        scratch.estimate(storage, "CUB", "a selection")
        gpu.waits()


def _bins(gpu: GPU, self: Tensor, weights: Tensor | None) -> Scratch:
    scratch = Scratch(gpu)
    if weights is not None and weights.dtype not in (torch.float32, torch.float64):
        scratch.take(weights.numel() * torch.float64.itemsize)
    if self.numel():
        apart = 1 if self.dtype == torch.uint8 else 2
        _read_extremes(gpu, scratch, self, 0 if gpu.version >= _BINS_BY_BOTH_SINCE else apart)
    return scratch


def _read_extremes(gpu: GPU, scratch: Scratch, tensor: Tensor, apart: int = 0) -> None:
    """Allocate what the host reads: both extremes at once, or so many one after the other."""
    size = tensor.element_size()
    if not apart:
        scratch.take(size, size)
        reductions.reduce_whole(gpu, tensor, reductions.TWO_VALUES)
    for _ in range(apart):
        with Scratch(gpu, size):
            reductions.reduce_whole(gpu, tensor, reductions.VALUES)
    gpu.waits()


def _zero_points(gpu: GPU, zero_point: Tensor) -> None:
    """Allocate for the extremes of integers (native/quantized/FakeQuantPerChannelAffine.cpp)."""
    if not zero_point.is_floating_point():
        borrow(gpu, zero_point.element_size(), zero_point.element_size(), is_read=True)


def _range(gpu: GPU, self: Tensor, min: float, max: float) -> None:
    if min == max and self.numel():
        apart = 0 if gpu.version >= BOTH_EXTREMES_SINCE else 2
        _read_extremes(gpu, Scratch(gpu), self, apart)


def _static(gpu: GPU, self: Tensor, size: int) -> None:
    """Allocate the number of elements each block has found, and the start of its places."""
    if not (self.dim() and self.numel() and size):
        return
    tiles = -(-self.numel() // _STATIC_TILE)
    in_turn = -(-tiles // gpu.model.sm_count)
    blocks = -(-self.numel() // (in_turn * _STATIC_TILE))
    borrow(gpu, blocks * 4, blocks * INDEX_BYTES)


ABOVE_AUTOGRAD: dict[str, Composite] = {
    "aten.isclose.default": with_in_place(
        torch.ops.aten.isclose.default,
        {torch.ops.aten.bitwise_and.Tensor: torch.ops.aten.bitwise_and_.Tensor},
    )
}

RULES = {
    "_assert_async": Rule(before=_assert),
    # A number becomes a tensor of 64 bits.
    "isin": Rule(
        before=lambda gpu, element=None: None if element is None else Scratch(gpu, 8), after=_isin
    ),
    "fake_quantize_per_channel_affine_cachemask": Rule(before=_zero_points),
    "searchsorted bucketize": Rule(before=_number, after=_search),
    "nonzero_static": Rule(after=_static),
    "_unique _unique2 unique_consecutive": Rule(before=_before, outputs=_placed, after=_select),
    "unique_dim": Rule(before=_before),
    "bincount": Rule(before=_bins),
    "histc": Rule(after=_range),
}
