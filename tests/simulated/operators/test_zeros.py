"""Zeros without memory in forward-mode derivatives: events of torch 2.15.0+cu132 on an A100."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pytest_gpumem.simulated.operators.tables import MAY_OVERRIDE

pytestmark = [
    pytest.mark.skipif(not MAY_OVERRIDE, reason="torch 2.6 keeps its own kernels"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # torch._decomp, imported late
]

BYTES = 64 * 64 * 4
MADE = [4, -4]
"""Zeros, made to ask ``meta`` for a shape."""


def zeros() -> Tensor:
    made: Tensor = torch._efficientzerotensor((64, 64), device="cuda")
    return made


CASES: dict[str, tuple[Callable[[Tensor], Any], list[int]]] = {
    "added": (lambda x: zeros() + x, [*MADE, BYTES]),
    "added to": (lambda x: x + zeros(), [*MADE, BYTES]),
    "a multiple added": (
        lambda x: torch.add(zeros(), x, alpha=2),
        [*MADE, BYTES, BYTES, -BYTES],
    ),
    "a number added": (lambda x: zeros() + 2.0, [*MADE, BYTES]),
    "subtracted": (lambda x: x - zeros(), [*MADE, BYTES]),
    "subtracted from": (lambda x: zeros() - x, [*MADE, BYTES, BYTES, -BYTES]),
    "both": (lambda x: zeros() - zeros(), [*MADE, *MADE]),
    "multiplied": (lambda x: zeros() * x, MADE),
    "divided": (lambda x: zeros() / x, MADE),
    "divided by": (lambda x: x / zeros(), [*MADE, BYTES]),
    "in a dot product": (lambda x: torch.dot(zeros()[0], x[0]), []),
}


@pytest.mark.parametrize("case", CASES)
def test_zero_tensors_of_forward_mode_take_no_memory(on: Any, case: str) -> None:
    run, expected = CASES[case]
    gpu = on()
    given = torch.randn(64, 64, device="cuda")
    assert gpu.of(lambda: run(given)) == expected


def test_the_tangent_of_a_product_has_the_events_of_torch(on: Any) -> None:
    gpu = on()
    x, weight = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")

    def tangent() -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            made: Tensor = forward_ad.unpack_dual(dual * weight).tangent
            return made

    assert gpu.of(tangent) == [BYTES, BYTES, *MADE, *MADE, BYTES, -BYTES, -BYTES]
