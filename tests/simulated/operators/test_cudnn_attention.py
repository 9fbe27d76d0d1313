"""Gradients of cuDNN's attention, as torch's own code allocates on the dry device (2.6 to 2.15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HALVES = 2 * 8 * 1024 * 64 * 2
"""Bytes of each operand: two sequences, eight heads, 1024 rows of 64 numbers of two bytes."""
WORKSPACE = 256
"""Of cuDNN itself, as an H100 took it for each call."""
SUMS = 2 * 8 * 1024 * (64 + 1) * 4 + WORKSPACE
"""Of each row the gradient of its query, and one number more, in float32; and the workspace."""


def attended() -> tuple[Tensor, Tensor]:
    """Return a query, which is key and value, too, and the output."""
    query = torch.ones(2, 8, 1024, 64, device="cuda", dtype=torch.half, requires_grad=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return query, F.scaled_dot_product_attention(query, query, query)


def gradients(on: Any, release: str, *, expanded: bool) -> list[int]:
    gpu = on("H100", release)
    query, output = attended()
    gradient = torch.ones((), device="cuda", dtype=torch.half).expand_as(output)
    if not expanded:
        gradient = gradient.contiguous()
    events: list[int] = gpu.of(lambda: torch.autograd.grad(output, query, gradient))
    return events[: events.index(-SUMS) + 1]


@pytest.mark.parametrize("release", ["2.6", "2.13", "2.15"])
def test_backward_has_float32_sums_beside_the_gradients(on: Any, release: str) -> None:
    assert gradients(on, release, expanded=False) == [*[HALVES] * 3, SUMS, -SUMS]


def test_a_gradient_has_the_layout_of_the_output(on: Any) -> None:
    assert gradients(on, "2.15", expanded=True) == [*[HALVES] * 3, HALVES, SUMS, -SUMS]


def test_forward_allocates_a_workspace_behind_its_outputs(on: Any) -> None:
    gpu = on("H100", "2.11")
    query = torch.ones(2, 8, 1024, 64, device="cuda", dtype=torch.half, requires_grad=True)
    # The generator's seed and offset, the output, and a number of each row.
    kept = [8, 8, HALVES, 2 * 8 * 1024 * 4]
    events = gpu.of(lambda: F.scaled_dot_product_attention(query, query, query))
    assert events == [*kept, WORKSPACE, -WORKSPACE]


@pytest.mark.parametrize(("release", "copies"), [("2.6", [HALVES]), ("2.7", []), ("2.11", [])])
def test_a_gradient_by_length_is_copied_before_cudnn_9_5(
    on: Any, release: str, copies: list[int]
) -> None:
    # Whisper on an H100 with 2.11 copies no gradient; 2.6, 2.7, 2.11 and 2.15 on the dry device.
    gpu = on("H100", release)
    query, output = attended()
    gradient = torch.ones(2, 1024, 8, 64, device="cuda", dtype=torch.half).transpose(1, 2)
    events = gpu.of(lambda: torch.autograd.grad(output, query, gradient))
    assert events[: events.index(SUMS) + 1] == [*[HALVES] * 3, *copies, SUMS]
