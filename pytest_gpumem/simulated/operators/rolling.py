"""Rolling: one dim after the other, each from a contiguous tensor.

Source: aten/src/ATen/native/cuda/TensorTransformations.cu (roll_cuda) and
native/TensorTransformations.h (roll_common), torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Rule, Scratch


def _rolled_so_far(gpu: GPU, self: Tensor, dims: Sequence[int]) -> Scratch | None:
    """Return the input for rolling the last dim: the roll of the dims before it, or a copy."""
    if self.is_contiguous() and len(dims) < 2:
        return None
    scratch = Scratch(gpu)
    earlier = 0 if self.is_contiguous() else scratch.take(self.nbytes)
    for _ in dims[1:]:
        rolled = scratch.take(self.nbytes)
        scratch.drop(earlier)
        earlier = rolled
    return scratch


RULES = {"aten::roll": Rule(before=_rolled_so_far)}
