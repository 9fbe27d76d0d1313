"""List operators: one partial result per chunk of 65,536 elements and tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


def test_norms_of_a_list_share_a_buffer(on: Any) -> None:
    gpu = on("A100-40GB", "2.14")
    tensors = [torch.ones(size, device="cuda") for size in (100, 200_000)]
    # Two tensors, four chunks in the larger, then the two results.
    assert gpu.of(lambda: torch._foreach_norm(tensors)) == [2 * 4 * 4, 4, 4, -2 * 4 * 4]


def test_each_tensor_of_a_list_has_its_own_chunks_since_2_15(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    tensors = [torch.ones(size, device="cuda") for size in (100, 200_000, 0)]
    # Where two tensors' chunks begin and end; one chunk and four.
    taken = [3 * 8, (1 + 4) * 4, 4, 4, 4]
    assert gpu.of(lambda: torch._foreach_norm(tensors)) == [*taken, -(1 + 4) * 4, -3 * 8]
    two = tensors[:2]
    events = [3 * 8, 4, 4, (1 + 4) * 4, -(1 + 4) * 4, -3 * 8]
    assert gpu.of(lambda: torch._foreach_max(two)) == events


def test_norms_in_another_type_are_accumulated_in_it(on: Any) -> None:
    gpu = on("A100-40GB", "2.14")
    tensors = [torch.ones(100, device="cuda", dtype=torch.bfloat16)]
    # One chunk of one tensor, as float32 for bfloat16 and as float64 for float64.
    assert gpu.of(lambda: torch._foreach_norm(tensors)) == [4, 2, -4]
    assert gpu.of(lambda: torch._foreach_norm(tensors, dtype=torch.float64)) == [8, 8, -8]


def test_norms_of_other_orders_are_reduced_one_by_one(on: Any) -> None:
    gpu = on()
    large = torch.ones(2048, 2048, device="cuda")
    alone = gpu.of(lambda: torch.linalg.vector_norm(large))
    assert len(alone) > 1  # a result, partial results, semaphores
    small = torch.ones(10, device="cuda")
    events = gpu.of(lambda: torch._foreach_norm([large, small], 3))
    assert sorted(events) == sorted([*alone, 4])
    every_other = small[::2]
    assert gpu.of(lambda: torch._foreach_norm([small, every_other])) == [4, 4]


def test_maxima_of_a_list_share_a_buffer(on: Any) -> None:
    gpu = on("A100-40GB", "2.14")
    tensors = [torch.ones(size, device="cuda", dtype=torch.float64) for size in (100, 70_000)]
    assert gpu.of(lambda: torch._foreach_max(tensors)) == [8, 8, 2 * 2 * 8, -2 * 2 * 8]


@pytest.mark.parametrize(
    ("make", "lists"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.AdamW(p, fused=True), 0),
        (lambda p: torch.optim.AdamW(p), 1),
        (lambda p: torch.optim.Adam(p), 1),
    ],
    ids=["SGD", "fused AdamW", "AdamW", "Adam"],
)
def test_temporary_lists_of_a_step(on: Any, make: Any, lists: int) -> None:
    # CliffKai/assignment2-systems, medium: AdamW's step allocates sqrt of every second moment.
    gpu = on()
    model = nn.Linear(256, 256).cuda()
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    events = gpu.of(optimizer.step)
    assert [event for event in events if event > 4] == [256 * 256 * 4, 256 * 4] * lists
