"""Operators whose tensors are on two GPUs: the events of torch 2.15 on the dry device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_gpumem import SimulatedRun, simulate

SIGNS = {"alloc": 1, "free_requested": -1}


def events_of(run: SimulatedRun, call: Callable[[], Any]) -> list[list[int]]:
    """Return the bytes that ``call()`` takes and frees on each GPU, in order."""
    before = [len(gpu.trace) for gpu in run.devices]
    call()
    new = [gpu.trace[at:] for gpu, at in zip(run.devices, before, strict=True)]
    return [[SIGNS[one.action] * one.size for one in each if one.action in SIGNS] for each in new]


@pytest.mark.parametrize("reduce", [torch._foreach_norm, torch._foreach_max])
def test_lists_are_reduced_one_by_one(reduce: Callable[..., Any]) -> None:
    with simulate("A100-40GB*2", torch_version="2.15") as run:
        few = [torch.ones(count, device=f"cuda:{at % 2}") for at, count in enumerate((90, 70, 30))]
        assert events_of(run, lambda: reduce(few)) == [[4, 4, -4, -4], [4, -4]]
        assert events_of(run, lambda: reduce(few[::2]))[0] != [4, 4, -4, -4]  # one launch
        results = reduce(few)
        assert [one.device.index for one in results] == [0, 1, 0]


def test_a_norm_of_two_gpus_has_a_gradient() -> None:
    with simulate("A100-40GB*2"):
        pair = [torch.ones(5, device=f"cuda:{at}", requires_grad=True) for at in range(2)]
        torch.stack([one.cpu() for one in torch._foreach_norm(pair)]).sum().backward()
        assert [one.grad.device.index for one in pair if one.grad is not None] == [0, 1]


def test_index_put_copies_indices_of_another_gpu() -> None:
    with simulate("A100-40GB*2", torch_version="2.15") as run:
        x, index = torch.ones(7, 500, device="cuda:1"), torch.zeros(3, dtype=torch.long).cuda(0)
        row = x[:1]
        summed = events_of(run, lambda: x.index_put((index,), row, accumulate=True))
        assert summed[0] == [8, 8, 1, -1, 1, -1, -8, -8, 24, 24, -24, -24]
        sort = [24, 24, 24, 1, -1, -24, -24, -24]
        assert summed[1] == [14000, 24, 6000, *sort, -6000, -24, -14000]
        put = events_of(run, lambda: x.index_put((index,), row))
        assert put == [[], [14000, 24, -24, -14000]]
        with pytest.raises(RuntimeError, match="indices should be either on cpu"):
            x[index]
