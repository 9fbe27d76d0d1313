"""Norms and distances between rows: parts of their gradients, single elements, limits.

Source: aten/src/ATen/native/cuda/DistanceKernel.cu (pdist_backward_kernel_impl,
cdist_backward_kernel_impl: each pair of rows writes its part of a gradient, and ``sum_out`` adds
them up), native/Normalization.cpp (renorm_out) and LinearAlgebra.cpp (linalg_vector_norm_out), of
torch 2.6 to 2.15.
"""

from __future__ import annotations

import math

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import accumulated
from pytest_gpumem.simulated.operators.reductions import (
    NORMS,
    SUMS,
    Over,
    outputs_of,
    reduce,
    reduce_tensor,
)
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, borrow


def _parts(gpu: GPU, shape: tuple[int, int, int, int], like: Tensor) -> None:
    """Allocate and free (batch, others, rows, columns), and the memory of summing over others."""
    parts = Scratch(gpu, math.prod(shape) * like.element_size())
    strides = math.prod(shape[1:]), math.prod(shape[2:]), shape[3], 1
    reduce(gpu, shape, strides, like.dtype, 1, SUMS)
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
    """The norms of slices, and what they are multiplied by where that has another type."""
    slices = self.shape[dim]
    dtype = accumulated(self.dtype)
    is_converted = dtype != self.dtype.to_real()
    norms = slices * dtype.to_real().itemsize
    borrow(gpu, norms, slices * self.element_size() if is_converted else 0)


def _norm(
    gpu: GPU, self: Tensor, result: Tensor, dim: Over = None, ord: float = 2, p: float | None = 2
) -> None:
    """A norm, which of single elements is their absolute value.

    That does not hold for a number along a dim of its own.
    """
    are_single = outputs_of(self, dim) == self.numel() and (self.dim() > 0 or not dim)
    if self.is_complex() and ord != 0 and p != 0 and are_single:
        borrow(gpu, self.nbytes)
    else:
        reduce_tensor(gpu, self, dim, NORMS, result.dtype)


RULES = {
    "_cdist_backward": Rule(after=_cdist_backward),
    "_pdist_backward": Rule(after=_pdist_backward),
    "linalg_vector_norm norm": Rule(after=_norm),
    "renorm renorm_": Rule(after=_renorm),
}
