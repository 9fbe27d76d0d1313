"""Embedding tables: sorted indices and partial sums in the backward, and the forward's renorm.

Source: aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda,
embedding_renorm_cuda_), EmbeddingBackwardKernel.cu (embedding_backward_cuda_kernel),
EmbeddingBag.cu (_embedding_bag_cuda, embedding_bag_backward_cuda_sum_avg) and cuda/cub.cuh
(unique_by_key, exclusive_sum, inclusive_sum_by_key), torch 2.6 to 2.15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import cub
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES, accumulated, copied
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, borrow
from pytest_gpumem.simulated.operators.sorting import sort_slices

INDICES_WITHOUT_SORT = 3072
"""Most indices for which one kernel adds the rows up in place."""
_ROWS_PER_PARTIAL_SUM = 10
_LARGEST_BLOCK = 1024
_ATOMIC_SINCE = (2, 11)
_SORTED_BY_USED_BITS_SINCE = (2, 13)
"""pull request 183578 of PyTorch; as 2.11 on an H100, and 2.12 and 2.13 on the dry device."""
_ATOMIC_BLOCKS_PER_SM = 4
"""Fewest blocks of the last step that do not add partial sums atomically."""
_MAX = 2
"""EmbeddingBagMode: its backward only adds."""


def _sums_rows(indices: Tensor, by_frequency: bool, mode: int | None, sparse: bool) -> bool:
    """Return whether rows, or those of bags by their ``mode``, are sorted and then summed."""
    if mode is None:
        return indices.numel() > INDICES_WITHOUT_SORT or by_frequency
    return bool(indices.numel()) and mode != _MAX and not sparse


def _before_backward(
    gpu: GPU,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    grad_output: Tensor | None = None,
    grad: Tensor | None = None,
    mode: int | None = None,
    sparse: bool = False,
) -> Scratch:
    """Allocate to sort the indices with their places, and to count them for their frequency."""
    scratch = Scratch(gpu, *copied(indices if mode is None else None, grad_output, grad))
    if not _sums_rows(indices, scale_grad_by_freq, mode, sparse):
        return scratch
    count, element = indices.numel(), indices.element_size()
    capability = gpu.model.compute_capability
    scratch.take(count * element, count * element)
    positions = scratch.take(count * element)
    bits = 8 * element
    if gpu.version >= _SORTED_BY_USED_BITS_SINCE:
        bits = cub.bits_of(num_weights if padding_idx >= 0 else num_weights - 1 - padding_idx)
    borrow(gpu, cub.radix_sort_pairs_bytes(count, element, element, bits, capability))
    scratch.drop(positions)
    if scale_grad_by_freq:
        scratch.take(count * element)
        for _ in ("counts", "the highest of each row"):
            borrow(gpu, cub.sum_by_key_bytes(count, element, capability))
    return scratch


def _after_backward(
    gpu: GPU,
    indices: Tensor,
    scale_grad_by_freq: bool,
    result: Tensor,
    mode: int | None = None,
    sparse: bool = False,
) -> None:
    """Allocate for embedding_backward_cuda_kernel: sums of up to ten rows, then sums of those."""
    if not _sums_rows(indices, scale_grad_by_freq, mode, sparse):
        return
    count, element = indices.numel(), indices.element_size()
    rows, width = result.shape
    version, capability = gpu.version, gpu.model.compute_capability
    scratch = Scratch(gpu, count * element, INDEX_BYTES)
    keys = scratch.take(count * element)
    borrow(gpu, cub.unique_by_key_bytes(count, element, capability, version))
    scratch.drop(keys)
    segments = min(count, rows)
    scratch.take(segments * element, segments * element)
    borrow(gpu, cub.scan_bytes(segments, element, version))
    scratch.take(INDEX_BYTES)
    partial_sums = count // _ROWS_PER_PARTIAL_SUM + segments
    scratch.take(partial_sums * element)
    if mode is None and _is_atomic(gpu, segments, partial_sums, width):
        scratch.take(partial_sums * element)
        if result.element_size() < 4:
            scratch.take(result.numel() * 4)
    else:
        scratch.take(partial_sums * width * accumulated(result.dtype).itemsize)


def _is_atomic(gpu: GPU, segments: int, partial_sums: int, width: int) -> bool:
    lanes = -(-width // 32) * 32
    blocks = -(-segments * lanes // min(lanes, _LARGEST_BLOCK))
    return (
        gpu.version >= _ATOMIC_SINCE
        and blocks < gpu.model.sm_count * _ATOMIC_BLOCKS_PER_SM
        and partial_sums > blocks * 4
        and not torch.are_deterministic_algorithms_enabled()
    )


def _renorm(gpu: GPU, indices: Tensor) -> None:
    count, nbytes = indices.numel(), indices.nbytes
    if not count:
        return
    scratch = Scratch(gpu, nbytes)
    positions = scratch.take(count * INDEX_BYTES)
    sort_slices(gpu, raw.unbacked(indices, (count,)), 0, (1,))
    scratch.drop(positions)
    scratch.take(nbytes, INDEX_BYTES)
    borrow(gpu, cub.unique_bytes(count, gpu.model.compute_capability, gpu.version))


RULES = {
    # Copies indices for ``index_select`` by ``indices.reshape(-1)`` (native/Embedding.cpp).
    "embedding": Rule(
        before=lambda gpu, indices: Scratch(gpu, *copied(indices)) if indices.dim() != 1 else None
    ),
    "embedding_dense_backward _embedding_bag_backward": Rule(
        before=_before_backward, after=_after_backward
    ),
    # Sizes of bags, the bag of each index, the output, and the highest places.
    "_embedding_bag _embedding_bag_forward_only": Rule(
        outputs=lambda result: (result[2], result[1], result[0], result[3])
    ),
    "embedding_renorm_": Rule(after=_renorm),
}
