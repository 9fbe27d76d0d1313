"""Distinct values and their counts: copies, sorts and the memory that results keep.

Source: aten/src/ATen/native/cuda/UniqueCub.cu (UniqueCub, compute_unique) and SummaryOps.cu
(_bincount_cuda_template, _histc_cuda_template) of torch 2.6 to 2.15. Of CUB's storage the sorts are
exact; the scans and selections, of a state for each of many hundred elements, are estimated.
``unique(dim=...)`` sorts by Thrust, whose storage is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import cub, reductions
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES, copied
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, passing

_SHORT_INDEX_BYTES = 4
BOTH_EXTREMES_SINCE = (2, 12)
"""``aminmax`` in histc, multinomial and index_put; before, ``min`` and ``max`` one after the other
(tried on 2.11 and 2.13)."""
_STATIC_TILE = 512 * 16
"""Elements that a block of nonzero_static_cuda_out_impl (Nonzero.cu) counts at once."""


def _before(
    gpu: GPU,
    self: Tensor,
    return_inverse: bool,
    dim: int | None = None,
    sorted: bool | None = None,
) -> Scratch | None:
    """Sort and number the distinct values, before the results are allocated.

    Equal neighbours (unique_consecutive, which has no ``sorted``) are only numbered.
    """
    if dim is not None or not self.numel():
        return None
    scratch = Scratch(gpu, *copied(self))
    if sorted is not None and self.dtype == torch.bool:
        scratch.take(4)
        return scratch
    count, size = self.numel(), self.element_size()
    if sorted is not None:
        index = INDEX_BYTES if return_inverse else 0
        scratch.take(count * size)
        indices = scratch.take(count * index)
        scratch.take(count * index)
        at = gpu.model.compute_capability, gpu.model.sm_count
        scratch.passing(cub.radix_sort_pairs_bytes(count, size, index, 8 * size, *at))
        scratch.drop(indices)
    if return_inverse:
        # The inverse is there already; it comes to stay where this leaves room.
        inverse = scratch.take(count * INDEX_BYTES)
        numbers = scratch.take(count * (_SHORT_INDEX_BYTES if sorted is None else INDEX_BYTES))
        storage = cub.scan_bytes(min(count, cub.LARGEST_SCAN), 4, gpu.version)
        scratch.drop(scratch.estimate(storage, "CUB", "a prefix sum"))
        scratch.drop(numbers, inverse)
    return scratch


_Distinct = tuple[Tensor, Tensor, Tensor]
"""Values, the index of each element's value, and the count of each value."""


def _placed(
    self: Tensor,
    return_counts: bool,
    result: _Distinct,
    dim: int | None = None,
    sorted: bool | None = None,
) -> Iterator[Tensor]:
    """Yield the results, which CUDA makes as large as the input and then shortens in place."""
    values, inverse, counts = result
    is_truth = sorted is not None and self.dtype == torch.bool
    room = 2 if is_truth else self.numel()
    yield inverse
    if dim is None:
        values.untyped_storage().resize_(room * values.element_size())
    yield values
    if dim is None and (is_truth or return_counts):
        counts.untyped_storage().resize_(room * counts.element_size())
    yield counts


def _select(gpu: GPU, self: Tensor, dim: int | None = None, sorted: bool | None = None) -> None:
    if dim is None and self.numel() and (sorted is None or self.dtype != torch.bool):
        capability = gpu.model.compute_capability
        storage = cub.unique_bytes(self.numel(), capability, gpu.version)
        Scratch(gpu, INDEX_BYTES).estimate(storage, "CUB", "a selection")


def _extreme(gpu: GPU, tensor: Tensor) -> None:
    extreme = Scratch(gpu, tensor.element_size())
    reductions.reduce_tensor(gpu, tensor, None, reductions.VALUES)
    extreme.free()


def _bins(gpu: GPU, self: Tensor, weights: Tensor | None) -> Scratch:
    scratch = Scratch(gpu)
    if weights is not None and weights.dtype not in (torch.float32, torch.float64):
        scratch.take(weights.numel() * torch.float64.itemsize)
    if self.numel():
        for _ in range(1 if self.dtype == torch.uint8 else 2):
            _extreme(gpu, self)
    return scratch


def _range(gpu: GPU, self: Tensor, min: float, max: float) -> None:
    if min != max or not self.numel():
        return
    if gpu.version >= BOTH_EXTREMES_SINCE:
        extremes = Scratch(gpu, self.element_size(), self.element_size())
        reductions.reduce_tensor(gpu, self, None, reductions.TWO_VALUES)
        extremes.free()
    else:
        for _ in range(2):
            _extreme(gpu, self)


def _static(gpu: GPU, self: Tensor) -> None:
    """Allocate the number of elements each block has found, and the start of its places."""
    if not self.numel():
        return
    tiles = -(-self.numel() // _STATIC_TILE)
    in_turn = -(-tiles // gpu.model.sm_count)
    blocks = -(-self.numel() // (in_turn * _STATIC_TILE))
    passing(gpu, blocks * 4, blocks * INDEX_BYTES)


RULES = {
    "nonzero_static": Rule(after=_static),
    "_unique2 unique_consecutive": Rule(before=_before, placed=_placed, after=_select),
    "bincount": Rule(before=_bins),
    "histc": Rule(after=_range),
}
