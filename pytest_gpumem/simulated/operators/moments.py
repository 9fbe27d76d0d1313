"""Moments, norms, distances and powers: conversions, complex numbers, parts of gradients.

Source: aten/src/ATen/native/UnaryOps.cpp (unary_op_impl_with_complex_to_float_out, abs, angle),
ReduceOps.cpp (std_var_out, std_var_mean_out), Pow.cpp (the meta function of pow.Tensor_Scalar,
pow_Scalar_out), cuda/DistanceKernel.cu (pdist_backward_kernel_impl, cdist_backward_kernel_impl:
each pair of rows writes its part of a gradient, and ``sum_out`` adds them up), Normalization.cpp
(renorm_out) and LinearAlgebra.cpp (linalg_vector_norm_out), torch 2.6 to 2.15.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.layout import accumulated, copied
from pytest_gpumem.simulated.operators.reductions import Over, outputs_of
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, borrow


def _as_complex(gpu: GPU, self: Tensor) -> Scratch:
    """Allocate the complex result of the kernel, of which the real part is copied."""
    return Scratch(gpu, self.nbytes if self.is_complex() else 0)


def _moments(outputs: int, gpu: GPU, self: Tensor, dim: Over = None) -> Scratch | None:
    """Allocate for ``outputs`` numbers of the real, and then of the imaginary parts."""
    if not self.is_complex():
        return None
    scratch = Scratch(gpu)
    real = self.dtype.to_real()
    strides = tuple([2 * stride for stride in self.stride()])
    kept = outputs_of(self, dim) * real.itemsize
    for _ in ("real", "imaginary"):
        scratch.take(*[kept] * outputs)
        reductions.reduce(gpu, tuple(self.shape), strides, real, dim, reductions.MOMENTS)
    return scratch


def _real_moments(
    gpu: GPU, self: Tensor, result: Tensor | tuple[Tensor, ...], dim: Over = None
) -> None:
    if not self.is_complex():
        first = result if isinstance(result, Tensor) else result[0]
        reductions.reduce_tensor(gpu, self, dim, reductions.MOMENTS, first.dtype)


def _base(gpu: GPU, self: Tensor | complex, exponent: Tensor | complex) -> Scratch | None:
    """Allocate a base converted to the type of the power, if it has another one."""
    if not isinstance(self, Tensor) or isinstance(exponent, Tensor):
        return None
    common = torch.result_type(self, exponent)
    return Scratch(gpu, self.numel() * common.itemsize if common != self.dtype else 0)


def _number(gpu: GPU, self: Tensor | complex) -> None:
    """Allocate a base that is a number, as a tensor of its own type: 64-bit, or complex."""
    if not isinstance(self, Tensor) and self != 1:
        borrow(gpu, 16 if isinstance(self, complex) else 8)


def _parts(gpu: GPU, shape: tuple[int, int, int, int], like: Tensor) -> None:
    """Allocate and free (batch, others, rows, columns), and the memory of summing over others."""
    strides = math.prod(shape[1:]), math.prod(shape[2:]), shape[3], 1
    with Scratch(gpu, math.prod(shape) * like.element_size()):
        reductions.reduce(gpu, shape, strides, like.dtype, 1, reductions.SUMS)


_ZERO_NORMS = (2, 15)
"""First release that computes gradients of the norm 0; others return zeros at once."""


def _cdist(gpu: GPU, x1: Tensor, x2: Tensor) -> Scratch:
    """Take contiguous copies of both, as large as the batch (cdist_impl)."""
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return Scratch(gpu, *copied(*(one.expand(*batch, *one.shape[-2:]) for one in (x1, x2))))


def _cdist_backward(gpu: GPU, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> None:
    rows, others, columns = x1.shape[-2], x2.shape[-2], x1.shape[-1]
    if rows and others and (p or gpu.version >= _ZERO_NORMS):
        _parts(gpu, (cdist.numel() // (rows * others), others, rows, columns), x1)


def _pdist_backward(gpu: GPU, self: Tensor, p: float) -> None:
    rows, columns = self.shape
    if rows > 1 and (p or gpu.version >= _ZERO_NORMS):
        _parts(gpu, (1, rows - 1, rows, columns), self)


def _renorm(gpu: GPU, self: Tensor, dim: int) -> None:
    """Allocate the norms of slices, and the factors if those have another type."""
    slices = self.shape[dim]
    dtype = accumulated(self.dtype)
    is_converted = dtype != self.dtype.to_real()
    norms = slices * dtype.to_real().itemsize
    borrow(gpu, norms, slices * self.element_size() if is_converted else 0)


def _norm(
    gpu: GPU, self: Tensor, result: Tensor, dim: Over = None, ord: float = 2, p: float | None = 2
) -> None:
    """Allocate for a norm, which of single elements is their absolute value.

    That does not hold for a number along a dim of its own.
    """
    are_single = outputs_of(self, dim) == self.numel() and (self.dim() > 0 or not dim)
    if self.is_complex() and ord != 0 and p != 0 and are_single:
        borrow(gpu, self.nbytes)
    else:
        reductions.reduce_tensor(gpu, self, dim, reductions.NORMS, result.dtype)


RULES = {
    # abs makes its result before, angle has it resized.
    "abs": Rule(after=_as_complex),
    "angle": Rule(before=_as_complex),
    "pow": Rule(before=_base, after=_number),
    "var std": Rule(before=partial(_moments, 1), after=_real_moments),
    "var_mean std_mean": Rule(before=partial(_moments, 2), after=_real_moments),
    "_cdist_forward": Rule(before=_cdist),
    "_cdist_backward": Rule(
        before=lambda gpu, x1, x2: _cdist(gpu, x1, x2) if x1.numel() and x2.numel() else None,
        after=_cdist_backward,
    ),
    "_pdist_backward": Rule(after=_pdist_backward),
    "linalg_vector_norm norm": Rule(after=_norm),
    "renorm renorm_": Rule(after=_renorm),
}
