"""Rolling: one dim after the other, each from a contiguous tensor.

Source: aten/src/ATen/native/cuda/TensorTransformations.cu (roll_cuda) and
native/TensorTransformations.h (roll_common), torch 2.6 to 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.simulated.operators.rules import Rule, Scratch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import GPU


def _rolled_so_far(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    """What the last of the dims is rolled from: the roll of those before it, or a copy."""
    tensor = args[0]
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    nbytes = tensor.nbytes
    if tensor.is_contiguous() and len(dims) < 2:
        return None
    scratch = Scratch(gpu)
    earlier = 0 if tensor.is_contiguous() else scratch.take(nbytes)
    for _ in dims[1:]:
        rolled = scratch.take(nbytes)
        scratch.drop(earlier)
        earlier = rolled
    return scratch


RULES = {"aten::roll": Rule(before=_rolled_so_far)}
