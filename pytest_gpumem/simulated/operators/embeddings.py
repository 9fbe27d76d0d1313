"""Embedding tables: sorted indices and partial sums of the backward, and the forward's renorm.

Source: aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda,
embedding_renorm_cuda_), EmbeddingBackwardKernel.cu (embedding_backward_cuda_kernel),
EmbeddingBag.cu (_embedding_bag_cuda, embedding_bag_backward_cuda_sum_avg) and cuda/cub.cuh
(unique_by_key, exclusive_sum, inclusive_sum_by_key), torch 2.6 to 2.15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import cub
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES, accumulated, copied
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch
from pytest_gpumem.simulated.operators.sorting import sort_row

INDICES_WITHOUT_SORT = 3072
"""Most indices for which one kernel adds the rows up in place."""
_ROWS_PER_PARTIAL_SUM = 10
_LARGEST_BLOCK = 1024
_ATOMIC_SINCE = (2, 11)
_ATOMIC_BLOCKS_PER_SM = 4
"""Fewest blocks of the last step that do not add partial sums atomically."""
_MAX = 2
"""EmbeddingBagMode: its backward only adds."""


def _before_backward(
    gpu: GPU,
    grad_output: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Scratch:
    scratch = Scratch(gpu, *copied(indices, grad_output))
    if indices.numel() > INDICES_WITHOUT_SORT or scale_grad_by_freq:
        _sort(gpu, scratch, indices, num_weights, padding_idx, scale_grad_by_freq)
    return scratch


def _after_backward(gpu: GPU, indices: Tensor, scale_grad_by_freq: bool, result: Tensor) -> None:
    if indices.numel() > INDICES_WITHOUT_SORT or scale_grad_by_freq:
        _sum_rows(gpu, indices, result, may_be_atomic=True)


def _sort(
    gpu: GPU, scratch: Scratch, indices: Tensor, rows: int, padding: int, by_frequency: bool
) -> None:
    """The sorted indices and where they were, held in ``scratch``; their counts, too."""
    count, element = indices.numel(), indices.element_size()
    capability = gpu.model.compute_capability
    scratch.take(count * element)
    scratch.take(count * element)
    positions = scratch.take(count * element)
    bits = cub.bits_of(rows if padding >= 0 else rows - 1 - padding)
    scratch.passing(cub.radix_sort_pairs_bytes(count, element, element, bits, capability))
    scratch.drop(positions)
    if by_frequency:
        scratch.take(count * element)
        for _ in ("counts", "the highest of each row"):
            scratch.passing(cub.sum_by_key_bytes(count, element, capability))


def _sum_rows(gpu: GPU, indices: Tensor, result: Tensor, may_be_atomic: bool) -> None:
    """embedding_backward_cuda_kernel: sums of up to ten rows, then sums of those."""
    count, element = indices.numel(), indices.element_size()
    rows, width = result.shape
    version, capability = gpu.version, gpu.model.compute_capability
    scratch = Scratch(gpu, count * element, INDEX_BYTES)
    keys = scratch.take(count * element)
    scratch.passing(cub.unique_by_key_bytes(count, element, capability, version))
    scratch.drop(keys)
    segments = min(count, rows)
    scratch.take(segments * element)
    scratch.take(segments * element)
    scratch.passing(cub.scan_bytes(segments, element, version))
    scratch.take(INDEX_BYTES)
    partial_sums = count // _ROWS_PER_PARTIAL_SUM + segments
    scratch.take(partial_sums * element)
    if may_be_atomic and _is_atomic(gpu, segments, partial_sums, width):
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


def _adds_bags(indices: Tensor, mode: int, sparse: bool) -> bool:
    return bool(indices.numel()) and mode != _MAX and not sparse


def _before_bag_backward(
    gpu: GPU,
    grad: Tensor,
    indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    padding_idx: int,
) -> Scratch:
    scratch = Scratch(gpu, *copied(grad))
    if _adds_bags(indices, mode, sparse):
        _sort(gpu, scratch, indices, num_weights, padding_idx, scale_grad_by_freq)
    return scratch


def _after_bag_backward(gpu: GPU, indices: Tensor, mode: int, sparse: bool, result: Tensor) -> None:
    if _adds_bags(indices, mode, sparse):
        _sum_rows(gpu, indices, result, may_be_atomic=False)


def _bag_outputs(result: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    output, bag_of_index, bag_sizes, highest = result
    return bag_sizes, bag_of_index, output, highest


def _renorm(gpu: GPU, indices: Tensor) -> None:
    count, nbytes = indices.numel(), indices.nbytes
    if not count:
        return
    scratch = Scratch(gpu, nbytes)
    positions = scratch.take(count * INDEX_BYTES)
    sort_row(gpu, count, indices.element_size())
    scratch.drop(positions)
    scratch.take(nbytes)
    scratch.take(INDEX_BYTES)
    scratch.passing(cub.unique_bytes(count, gpu.model.compute_capability, gpu.version))


def _in_a_row(gpu: GPU, indices: Tensor) -> Scratch | None:
    """embedding (native/Embedding.cpp): ``index_select`` by ``indices.reshape(-1)``."""
    return Scratch(gpu, *copied(indices)) if indices.dim() != 1 else None


def one_hot(self: Tensor, num_classes: int) -> Tensor:
    """``aten::one_hot`` (native/Onehot.cpp): ones are scattered into zeros, unlike on ``meta``."""
    if self.dtype != torch.int64 or not self.numel() or num_classes < -1 or num_classes == 0:
        return _one_hot_as_it_is(self, num_classes)  # type: ignore[no-any-return]  # an operator
    if num_classes == -1:
        num_classes = int(self.max().item()) + 1
    result = torch.zeros((*self.shape, num_classes), dtype=self.dtype, device=self.device)
    return result.scatter_(-1, self.unsqueeze(-1), 1)


_one_hot_as_it_is = torch.ops.aten.one_hot.default.decompose

COMPOSITES: dict[str, Composite] = {"aten.one_hot.default": one_hot}
"""By overload."""

RULES = {
    "aten::embedding": Rule(before=_in_a_row),
    "aten::embedding_dense_backward": Rule(before=_before_backward, after=_after_backward),
    "aten::_embedding_bag_backward": Rule(before=_before_bag_backward, after=_after_bag_backward),
    "aten::_embedding_bag": Rule(placed=_bag_outputs),
    "aten::_embedding_bag_forward_only": Rule(placed=_bag_outputs),
    "aten::embedding_renorm_": Rule(after=_renorm),
}
