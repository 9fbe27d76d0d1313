"""Scattering, and reducing by index or segment: counts, and starts of segments.

Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp (scatter_reduce_two), SegmentReduce.cpp,
cuda/Indexing.cu (index_reduce_func_cuda_impl), cuda/SegmentReduce.cu (_segment_reduce_lengths_ and
_offsets_cuda_kernel) and cuda/UnfoldBackwardKernel.cu, of torch 2.6 to 2.15; the order of frees is
that of torch 2.6, 2.13 and 2.15 on the dry device.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import cub
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, passing


def _scattered_mean(gpu: GPU, src: Tensor, reduce: str, result: Tensor) -> None:
    """Allocate for adding up ones like the source where it went; nothing is divided by zero."""
    if reduce != "mean" or not src.numel():
        return
    passing(gpu, src.nbytes, result.nbytes, result.numel())


def _mean_by_index(gpu: GPU, source: Tensor, reduce: str, result: Tensor) -> None:
    if reduce == "mean":
        counts = Scratch(gpu, result.nbytes)
        counts.passing(source.nbytes)
        counts.passing(result.numel())


def _before_segments(gpu: GPU, lengths: Tensor | None, unsafe: bool) -> None:
    """Allocate for the check that lengths are not negative, and add up to the whole."""
    if lengths is None or unsafe:
        return
    passing(gpu, lengths.element_size())
    rows = max(lengths.numel() // max(lengths.shape[-1], 1), 1)
    passing(gpu, rows * INDEX_BYTES, rows, 1)


def _segments(
    gpu: GPU,
    lengths: Tensor | None,
    offsets: Tensor | None,
    data: Tensor,
    grad: Tensor | None = None,
) -> None:
    """The other of lengths and offsets, along the last dimension; CUB reduces those of a row."""
    of_a_row = grad is None and data.dim() == 1
    if lengths is None:
        if offsets is not None:
            rows = offsets.numel() // max(offsets.shape[-1], 1)
            passing(gpu, (offsets.numel() - rows) * offsets.element_size(), *[1] * of_a_row)
        return
    size = lengths.element_size()
    rows = lengths.numel() // max(lengths.shape[-1], 1)
    scratch = Scratch(gpu)
    first = scratch.take(rows * size)
    scratch.take((lengths.numel() + rows) * size)
    scratch.drop(first)
    if rows == 1:
        scratch.passing(cub.scan_bytes(lengths.numel() + 1, size, gpu.version))
    if of_a_row:
        scratch.passing(1)


def _unfold_backward(
    gpu: GPU, input_sizes: Sequence[int], dim: int, size: int, step: int, result: Tensor
) -> None:
    """Allocate for adding up overlapping windows by where they begin."""
    if step < size and input_sizes and result.numel():
        passing(gpu, input_sizes[dim] * INDEX_BYTES)


RULES = {
    "scatter_reduce scatter_reduce_": Rule(after=_scattered_mean),
    "index_reduce index_reduce_": Rule(after=_mean_by_index),
    "segment_reduce": Rule(before=_before_segments, after=_segments),
    "_segment_reduce_backward": Rule(after=_segments),
    "unfold_backward": Rule(after=_unfold_backward),
}
