"""Random numbers around means and with probabilities: checks and conversions.

Source: aten/src/ATen/native/DistributionTemplates.h (normal_impl, normal_out_impl,
CHECK_NORMAL_TENSOR_STD, bernoulli_impl_), cuda/DistributionBernoulli.cu and
cuda/DistributionTemplates.h (bernoulli_kernel), of torch 2.6 to 2.15.
"""

from __future__ import annotations

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.layout import HALVES
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, passing


def _check(gpu: GPU, std: Tensor | float = 1.0) -> None:
    """``std.min().ge(0)``: no deviation is below zero."""
    if isinstance(std, Tensor) and std.numel():
        least = Scratch(gpu, std.element_size())
        reductions.reduce_tensor(gpu, std, None, reductions.VALUES)
        least.passing(1)


def _normal(
    gpu: GPU, result: Tensor, mean: Tensor | float = 0.0, std: Tensor | float = 1.0
) -> None:
    if isinstance(std, Tensor):
        _check(gpu, std)
        if not isinstance(mean, Tensor):
            passing(gpu, result.element_size())
    elif isinstance(mean, Tensor):
        passing(gpu, result.nbytes)


def _bernoulli(gpu: GPU, self: Tensor, p: Tensor | float | None = None) -> None:
    """Probabilities of 16 bits are read as float32."""
    given = p if isinstance(p, Tensor) else self if p is None else None
    if given is not None and given.dtype in HALVES:
        passing(gpu, given.numel() * 4)


RULES = {
    "normal": Rule(before=_check, after=_normal),
    "bernoulli bernoulli_": Rule(after=_bernoulli),
}
