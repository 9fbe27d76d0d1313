"""Numbers of other types than a kernel's: bases that are converted, complex numbers in parts.

Source: aten/src/ATen/native/UnaryOps.cpp (unary_op_impl_with_complex_to_float_out, abs, angle),
ReduceOps.cpp (std_var_out, std_var_mean_out) and Pow.cpp (the meta function of pow.Tensor_Scalar,
pow_Scalar_out), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.reductions import Over
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, borrow


def _as_complex(gpu: GPU, self: Tensor) -> Scratch:
    """The kernel's result is complex; its real part is copied."""
    return Scratch(gpu, self.nbytes if self.is_complex() else 0)


def _moments(outputs: int) -> Callable[..., Scratch | None]:
    """Return the part of a rule that computes ``outputs`` numbers of each part by itself."""

    def before(gpu: GPU, self: Tensor, dim: Over = None) -> Scratch | None:
        if not self.is_complex():
            return None
        scratch = Scratch(gpu)
        real = self.dtype.to_real()
        strides = tuple([2 * stride for stride in self.stride()])
        kept = reductions.outputs_of(self, dim) * real.itemsize
        for _ in ("real", "imaginary"):
            scratch.take(*[kept] * outputs)
            reductions.reduce(gpu, tuple(self.shape), strides, real, dim, reductions.MOMENTS)
        return scratch

    return before


def _real_moments(
    gpu: GPU, self: Tensor, result: Tensor | tuple[Tensor, ...], dim: Over = None
) -> None:
    if not self.is_complex():
        first = result if isinstance(result, Tensor) else result[0]
        reductions.reduce_tensor(gpu, self, dim, reductions.MOMENTS, first.dtype)


def _base(gpu: GPU, self: Tensor | complex, exponent: Tensor | complex) -> Scratch | None:
    """A base is converted to the type of the power, unless it has that."""
    if not isinstance(self, Tensor) or isinstance(exponent, Tensor):
        return None
    common = torch.result_type(self, exponent)
    return Scratch(gpu, self.numel() * common.itemsize if common != self.dtype else 0)


def _number(gpu: GPU, self: Tensor | complex) -> None:
    """A base that is a number becomes a tensor of its own type: 64-bit, or complex."""
    if not isinstance(self, Tensor) and self != 1:
        borrow(gpu, 16 if isinstance(self, complex) else 8)


RULES = {
    # abs makes its result before, angle has it resized.
    "abs": Rule(after=_as_complex),
    "angle": Rule(before=_as_complex),
    "pow": Rule(before=_base, after=_number),
    "var std": Rule(before=_moments(1), after=_real_moments),
    "var_mean std_mean": Rule(before=_moments(2), after=_real_moments),
}
