"""Sorting, selecting, scanning and sampling: copies, index ranges, checks and CUB's storage.

Source: aten/src/ATen/native/cuda/Sort.cpp (sort_cuda_kernel), Sort.cu (should_use_small_sort),
SortStable.cu (launch_stable_sort_kernel), TensorTopK.cpp and .cu (mbtopk::launch), Sorting.cpp
(kthvalue, median), TensorModeKernel.cpp, ScanKernels.cpp, ScanUtils.cuh (scan_dim), Randperm.cu,
MultinomialKernel.cu, native/Distributions.cpp (multinomial), DistributionTemplates.h (normal_impl,
normal_out_impl, CHECK_NORMAL_TENSOR_STD, bernoulli_impl_), cuda/DistributionBernoulli.cu and
cuda/DistributionTemplates.h (bernoulli_kernel), torch 2.6 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.operators import cub, reductions
from pytest_gpumem.simulated.operators.comparisons import BOTH_EXTREMES_SINCE
from pytest_gpumem.simulated.operators.layout import HALF_DTYPES, INDEX_BYTES, copied, is_dense
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, borrow, copies_of

_SORTED_IN_SHARED_MEMORY = 4096
"""Most elements of a dimension that one block sorts."""
_OWN_SORT_FROM = 1_000_000
"""Fewest elements of a dimension for which each slice is sorted by itself."""
_SLICES_SORTED_AT_ONCE = 128
"""Fewer slices are sorted in two passes over all elements, by value and then by slice."""


_Pair = tuple[Tensor, Tensor]
"""Values and indices."""


def _dim(tensor: Tensor, dim: int) -> int:
    return dim % tensor.dim() if tensor.dim() else 0


# Sort.


def sort_slices(gpu: GPU, tensor: Tensor, dim: int, result_strides: Sequence[int]) -> None:
    """Allocate and free the memory of sorting ``tensor`` along ``dim`` into given results."""
    if not tensor.dim() or not tensor.numel():
        return
    length = tensor.shape[dim]
    if length <= _SORTED_IN_SHARED_MEMORY:
        borrow(gpu, length * INDEX_BYTES)
        return
    scratch = Scratch(gpu)
    strides = tensor.stride()
    if not is_dense(tensor) or strides[dim] != 1:
        strides = _with_last(tensor, dim)
        scratch.take(tensor.nbytes)
    if tuple(result_strides) != tuple(strides):
        scratch.take(tensor.nbytes, tensor.numel() * INDEX_BYTES)
    # CUB counts in 32 bits: more elements are sorted in batches of whole slices.
    elements = tensor.numel()
    batch = min(elements, (2**31 - 1) // length * length)
    for first in range(0, elements, batch):
        _sort_batch(gpu, min(batch, elements - first), length, tensor.element_size())


def _with_last(tensor: Tensor, dim: int) -> tuple[int, ...]:
    """Return infer_dense_strides_dim_last: ``dim`` innermost, the others in order of stride."""
    order = sorted(
        (at for at in range(tensor.dim()) if at != dim), key=lambda at: tensor.stride(at)
    )
    strides = [1] * tensor.dim()
    step = tensor.shape[dim]
    for at in order:
        strides[at] = step
        step *= tensor.shape[at]
    return tuple(strides)


def _sort_batch(gpu: GPU, elements: int, length: int, element_bytes: int) -> None:
    model = gpu.model
    sms, capability = model.sm_count, model.compute_capability
    pair = element_bytes, INDEX_BYTES, 8 * element_bytes
    slices = elements // length
    own = Scratch(gpu)
    if slices == 1 or length >= _OWN_SORT_FROM:
        own.take(length * INDEX_BYTES)
        storage = cub.radix_sort_pairs_bytes(length, *pair, capability, sms)
        for _ in range(slices):
            borrow(gpu, storage)
    elif slices < _SLICES_SORTED_AT_ONCE:
        own.take(elements * INDEX_BYTES, elements * INDEX_BYTES)
        keys = own.take(elements * element_bytes)
        borrow(gpu, cub.radix_sort_pairs_bytes(elements, *pair, capability, sms))
        own.drop(keys)
        bits = max(1, math.ceil(math.log2(slices)))
        borrow(gpu, cub.radix_sort_pairs_bytes(elements, 8, 0, bits, capability))
    else:
        own.take(elements * INDEX_BYTES)
        borrow(gpu, cub.segmented_sort_pairs_bytes(elements, element_bytes, INDEX_BYTES))


# Top k.

_TOPK_THREADS = 256
_TOPK_REGISTERS = 40
_REGISTERS_PER_SM = 65_536
_RADIX_DIGITS = 256
_DIGIT_SUMS_SINCE = (2, 10)
"""First release whose blocks add the digit counts of a slice up in memory."""


def _many_blocks(slices: int, length: int) -> bool:
    """Return should_use_multiblock."""
    for most, shortest in ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000)):
        if slices <= most:
            return length >= shortest
    return length >= (800 if slices <= 4000 else 400)


def _topk(gpu: GPU, self: Tensor, k: int, dim: int, sorted: bool, result: _Pair) -> None:
    if not k or not self.numel():
        return
    dim = _dim(self, dim)
    length = self.shape[dim] if self.dim() else 1
    scratch = Scratch(gpu, *copied(self))
    slices = self.numel() // length
    if _many_blocks(slices, length):
        _topk_of_many_blocks(gpu, slices, length, self.element_size())
    scratch.free()
    values, indices = result
    if sorted and k > _SORTED_IN_SHARED_MEMORY:
        scratch.take(indices.nbytes, values.nbytes)
        sort_slices(gpu, values, dim, values.stride())
        borrow(gpu, indices.nbytes)


def _topk_of_many_blocks(gpu: GPU, slices: int, length: int, element_bytes: int) -> None:
    model = gpu.model
    blocks_per_sm = _REGISTERS_PER_SM // (_TOPK_REGISTERS * _TOPK_THREADS)
    threads = model.sm_count * blocks_per_sm * _TOPK_THREADS
    items = max(4, min(-(-length * slices // threads), 64))
    blocks = slices * -(-length // (items * _TOPK_THREADS))
    scratch = Scratch(gpu, slices * element_bytes)
    if gpu.version < _DIGIT_SUMS_SINCE:
        scratch.take(slices * 4)
    scratch.take(2 * slices * 4, 2 * slices * max(4, element_bytes), blocks * _RADIX_DIGITS * 2)
    if gpu.version >= _DIGIT_SUMS_SINCE:
        scratch.take(slices * _RADIX_DIGITS * 4)
    scratch.take(blocks * 4, blocks * 4)
    for _ in range(2):
        borrow(gpu, cub.sum_by_key_bytes(blocks, 4, model.compute_capability))


# Median, mode, k-th value.


def _median(gpu: GPU, self: Tensor, dim: int | None = None) -> Scratch:
    if dim is not None:
        return Scratch(gpu, *copied(self))
    scratch = _sorted_values(gpu, self)
    scratch.take(1)  # Whether the last is NaN.
    return scratch


def _nanmedian(gpu: GPU, self: Tensor, dim: int | None = None) -> Scratch:
    if dim is not None:
        return Scratch(gpu, *copied(self))
    scratch = _sorted_values(gpu, self)
    # index(sorted, ((size - 1 - sorted.isnan().sum()) / 2).to(int64))
    are_nan = scratch.take(self.numel())
    count = scratch.take(INDEX_BYTES)
    converted = scratch.take(self.numel() * INDEX_BYTES)
    reductions.reduce(gpu, (self.numel(),), (1,), torch.int64, None, reductions.SUMS)
    scratch.drop(converted)
    rest, half = scratch.take(INDEX_BYTES), scratch.take(4)
    scratch.take(INDEX_BYTES)
    scratch.drop(half, rest, count, are_nan)
    return scratch


def _sorted_values(gpu: GPU, tensor: Tensor) -> Scratch:
    """Return the values of ``tensor.flatten().sort()``, held."""
    scratch = Scratch(gpu)
    row = tensor.reshape(-1)
    flat = scratch.take(tensor.nbytes if storage_key(row) != storage_key(tensor) else 0)
    scratch.take(tensor.nbytes)
    indices = scratch.take(tensor.numel() * INDEX_BYTES)
    sort_slices(gpu, row, 0, (1,))
    scratch.drop(indices, flat)
    return scratch


def _mode(gpu: GPU, self: Tensor, dim: int) -> None:
    dim = _dim(self, dim)
    length = self.shape[dim] if self.dim() else 1
    is_copied = not self.transpose(dim, -1).is_contiguous()
    if length > 1 and (is_copied or length > 2048):
        borrow(gpu, self.nbytes)


# Prefix sums.


def _scan(gpu: GPU, self: Tensor, dim: int, result: Tensor) -> None:
    if not self.dim():
        if result is self:  # result.fill_(self), which copies a view of itself first (Fill.cpp)
            borrow(gpu, result.element_size())
        return
    if not self.numel():
        return
    converted = self.numel() * result.element_size()
    scratch = Scratch(gpu, converted if self.dtype != result.dtype else 0, *copied(result))
    # A conversion keeps the order of dims, and leaves no gaps.
    if not self.is_contiguous() and (self.dtype == result.dtype or is_dense(self)):
        scratch.take(converted)
    if self.numel() == self.shape[dim]:
        _scan_one_row(gpu, scratch, self.numel(), result)


def _scan_one_row(gpu: GPU, scratch: Scratch, elements: int, result: Tensor) -> None:
    size = result.element_size()
    for first in range(0, elements, cub.LARGEST_SCAN):
        carried = scratch.take(size) if first else 0
        count = min(elements - first, cub.LARGEST_SCAN)
        is_complex = result.is_complex()
        borrow(gpu, cub.scan_bytes(count, size, gpu.version, is_complex=is_complex))
        scratch.drop(carried)


# Permutations and samples.


def _randperm(gpu: GPU, n: int, result: Tensor) -> None:
    if not n:
        return
    # Keys wide enough that two equal ones are unlikely: the algorithm's note in Randperm.cu.
    wanted = math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9))))
    bits = min(64, wanted)
    key_bytes = 4 if bits <= 32 else 8
    storage = cub.radix_sort_pairs_bytes(
        n, key_bytes, result.element_size(), bits, gpu.model.compute_capability
    )
    borrow(gpu, result.element_size())  # whether its type holds n: scalar_tensor(n, options)
    borrow(gpu, result.nbytes, n * key_bytes, n * key_bytes, storage)


_NORMALIZED_ONCE_SINCE = (2, 14)
"""Tried on 2.13 and 2.15."""


def _multinomial(
    gpu: GPU, self: Tensor, num_samples: int, replacement: bool, result: Tensor
) -> None:
    if not result.numel():
        return
    scratch = Scratch(gpu)
    rows = self.shape[0] if self.dim() == 2 else 1
    length, size = self.shape[-1], self.element_size()
    if replacement and num_samples > 1:
        # Normalised weights and their prefix sums, and up to 2.13 the weights once more.
        for _ in range(2 if gpu.version >= _NORMALIZED_ONCE_SINCE else 3):
            scratch.take(self.nbytes)
        if rows == 1:
            _scan_one_row(gpu, scratch, length, self)
    else:
        _check_weights(gpu, scratch, self, rows)
        scratch.take(self.nbytes)
        if num_samples == 1:
            reductions.reduce_tensor(gpu, self, -1, reductions.VALUE_AND_INDEX)
        else:
            scratch.take(result.numel() * size)
            turned = is_dense(self) and not self.is_contiguous()  # so is what topk reads
            copies = Scratch(gpu, self.nbytes if turned else 0)
            if _many_blocks(rows, length):
                _topk_of_many_blocks(gpu, rows, length, size)
            copies.free()


def _check_weights(gpu: GPU, scratch: Scratch, weights: Tensor, rows: int) -> None:
    """Allocate for the sanity checks: extremes, their validity, whether a row has no weight."""
    size = weights.element_size()
    if gpu.version >= BOTH_EXTREMES_SINCE:
        scratch.take(size, size)
        reductions.reduce_whole(gpu, weights, reductions.TWO_VALUES)
        is_finite = scratch.take(1)
        is_positive = scratch.take(1)
        scratch.take(1)
        scratch.drop(is_positive, is_finite)
    else:
        highest = scratch.take(size)
        reductions.reduce_whole(gpu, weights, reductions.VALUES)
        is_finite = scratch.take(1)
        lowest = scratch.take(size)
        reductions.reduce_whole(gpu, weights, reductions.VALUES)
        is_positive = scratch.take(1)
        scratch.take(1)
        scratch.drop(is_positive, lowest, is_finite, highest)
    sums = scratch.take(rows * size)
    reductions.reduce_tensor(gpu, weights, -1, reductions.SUMS)
    are_zero = scratch.take(rows)
    if weights.dim() == 2:
        scratch.take(1)
        scratch.drop(are_zero)
    scratch.drop(sums)
    borrow(gpu, 1)


def _check(gpu: GPU, std: Tensor | float = 1.0) -> None:
    """Allocate for ``std.min().ge(0)``, the check that no deviation is below zero."""
    if isinstance(std, Tensor) and std.numel():
        with Scratch(gpu, std.element_size()):
            reductions.reduce_whole(gpu, std, reductions.VALUES)
            borrow(gpu, 1)


def _normal(
    gpu: GPU,
    result: Tensor,
    mean: Tensor | float = 0.0,
    std: Tensor | float = 1.0,
    out: Tensor | None = None,
) -> None:
    if isinstance(std, Tensor):
        if out is None:
            _check(gpu, std)
        if not isinstance(mean, Tensor):
            borrow(gpu, result.element_size())
    elif isinstance(mean, Tensor):
        borrow(gpu, result.nbytes)


def _bernoulli(gpu: GPU, self: Tensor, p: Tensor | float | None = None) -> None:
    """Allocate for probabilities of 16 bits, which are read as float32."""
    given = p if isinstance(p, Tensor) else self if p is None else None
    if given is not None and given.dtype in HALF_DTYPES:
        borrow(gpu, given.numel() * 4)


RULES = {
    "sort": Rule(
        after=lambda gpu, self, dim, result: sort_slices(
            gpu, self, _dim(self, dim), result[0].stride()
        )
    ),
    "topk": Rule(after=_topk),
    "kthvalue": Rule(before=copies_of("self")),
    "median": Rule(before=_median),
    "nanmedian": Rule(before=_nanmedian),
    "mode": Rule(after=_mode),
    "cumsum cumsum_ cumprod cumprod_ _logcumsumexp logcumsumexp": Rule(after=_scan),
    "cummax cummin _cummax_helper _cummin_helper": Rule(after=copies_of("self")),
    "randperm": Rule(after=_randperm),
    "multinomial": Rule(after=_multinomial),
    "normal": Rule(before=_check, after=_normal),
    "bernoulli bernoulli_": Rule(after=_bernoulli),
}
