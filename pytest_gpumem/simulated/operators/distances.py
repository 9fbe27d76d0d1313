"""Distances between rows: the parts of their gradients, and norms that are limited.

Source: aten/src/ATen/native/cuda/DistanceKernel.cu (pdist_backward_kernel_impl,
cdist_backward_kernel_impl: each pair of rows writes its part of a gradient, and ``sum_out`` adds
them up), native/Normalization.cpp (renorm_out), of torch 2.6 to 2.15.
"""

from __future__ import annotations

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.layout import accumulated
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, passing


def _parts(gpu: GPU, shape: tuple[int, int, int, int], like: Tensor) -> None:
    """Allocate and free (batch, others, rows, columns), and the memory of summing over others."""
    batch, others, rows, columns = shape
    elements = batch * others * rows * columns
    if not elements:
        return
    parts = Scratch(gpu, elements * like.element_size())
    strides = (others * rows * columns, rows * columns, columns, 1)
    reductions.reduce(gpu, shape, strides, like.dtype, 1, reductions.SUMS, like.dtype)
    parts.free()


_ZERO_NORMS = (2, 15)
"""First release that computes gradients of the norm 0; others return zeros at once."""


def _cdist_backward(gpu: GPU, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> None:
    rows, others, columns = x1.shape[-2], x2.shape[-2], x1.shape[-1]
    if rows and others and (p or gpu.version >= _ZERO_NORMS):
        _parts(gpu, (cdist.numel() // (rows * others), others, rows, columns), x1)


def _pdist_backward(gpu: GPU, self: Tensor, p: float) -> None:
    rows, columns = self.shape
    if rows > 1 and (p or gpu.version >= _ZERO_NORMS):
        _parts(gpu, (1, rows - 1, rows, columns), self)


def _renorm(gpu: GPU, self: Tensor, dim: int) -> None:
    """The norms of slices, and of halves what they are multiplied by."""
    slices = self.shape[dim]
    dtype = accumulated(self.dtype)
    is_converted = dtype != self.dtype and not self.dtype.is_complex
    passing(gpu, slices * dtype.itemsize, slices * self.element_size() if is_converted else 0)


RULES = {
    "aten::_cdist_backward": Rule(after=_cdist_backward),
    "aten::_pdist_backward": Rule(after=_pdist_backward),
    "aten::renorm": Rule(after=_renorm),
    "aten::renorm_": Rule(after=_renorm),
}
