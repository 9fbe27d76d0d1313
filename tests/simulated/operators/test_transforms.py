"""Kernels of CUDA within functions of torch.func, on an A100 of torch 2.15.0+cu132."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from pytest_gpumem.simulated.operators.tables import MAY_OVERRIDE

pytestmark = pytest.mark.skipif(not MAY_OVERRIDE, reason="torch 2.6 keeps its own kernels")

HEADS = 3 * 2 * 4 * 16 * 32 * 2
ROWS = 3 * 2 * 4 * 16 * 4


def attended(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


CASES: dict[str, tuple[Callable[[Tensor], Any], list[int]]] = {
    "attention": (vmap(attended), [HEADS, ROWS, 16, 8, -ROWS, -16, -8]),
    "dropout": (
        vmap(lambda x: functional.dropout(x, 0.5), randomness="different"),
        [HEADS // 2, HEADS, -HEADS // 2],
    ),
    "softmax": (
        vmap(lambda x: x.half().softmax(-1, dtype=torch.float32)),
        [HEADS, 2 * HEADS, -HEADS],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_vmap_has_the_events_of_cudas_kernels(on: Any, case: str) -> None:
    run, expected = CASES[case]
    gpu = on("A100-40GB", "2.15")
    given = torch.randn(3, 2, 4, 16, 32, device="cuda", dtype=torch.bfloat16)
    events = gpu.of(lambda: run(given))
    made = sum(size > 0 for size in expected)
    assert events[:made] == expected[:made]
    # A function's results are freed together: from the last on, if Dynamo is imported.
    assert sorted(events[made:]) == sorted(expected[made:])


def test_attention_within_grad_runs_flash_attention(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    given = torch.randn(3, 2, 4, 16, 32, device="cuda", dtype=torch.bfloat16).flatten(0, 1)
    events = gpu.of(lambda: grad(lambda x: attended(x).sum())(given))
    assert events[:4] == [HEADS, ROWS, 16, 8]  # flash attention, and none of the math path


def test_the_second_gradient_of_rms_norm_is_composite(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    given = torch.randn(3, 2, 4, 16, 32, device="cuda", requires_grad=True)
    size, sums = 2 * HEADS, ROWS
    result: list[Tensor] = []

    def first() -> None:
        loss = functional.rms_norm(given, (32,)).sum()
        result.extend(torch.autograd.grad(loss, given, create_graph=True))

    events = gpu.of(first)
    # The norm, its sum and the sum's gradient; then the formula that can be derived again.
    assert events[:5] == [size, sums, 4, -size, 4]
    assert events[5:14] == [sums, size, sums, -size, *[size] * 5]
    assert events[14:18] == [-size, -size, -size, -4]
    assert result[0].requires_grad
