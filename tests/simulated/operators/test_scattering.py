"""Scattered means, segment reductions and backward of unfold."""

from __future__ import annotations

from typing import Any

import torch

TABLE = 64 * 100 * 4
FLAGS = 64 * 100


def test_scatter_reduce_mean_counts_elements_of_each_index(on: Any) -> None:
    gpu = on()
    table, index = torch.randn(64, 100, device="cuda"), torch.zeros(3, 4).long().cuda()
    given = torch.randn(3, 4, device="cuda")
    # The result; ones of 12 floats; counts; where they are zero.
    assert gpu.of(lambda: table.scatter_reduce(0, index, given, "mean")) == [
        TABLE, 48, TABLE, FLAGS, -FLAGS, -TABLE, -48,
    ]  # fmt: skip
    assert gpu.of(lambda: table.scatter_reduce(0, index, given, "sum")) == [TABLE]


def test_index_reduce_mean_counts_elements_of_each_index(on: Any) -> None:
    gpu = on()
    table, given = (torch.randn(64, 100, device="cuda") for _ in range(2))
    index = torch.arange(100).cuda()
    assert gpu.of(lambda: table.index_reduce(1, index, given, "mean")) == [
        TABLE, TABLE, TABLE, -TABLE, FLAGS, -FLAGS, -TABLE,
    ]  # fmt: skip
    assert gpu.of(lambda: table.index_reduce(1, index, given, "prod")) == [TABLE]


def test_segment_reduce_derives_lengths_or_offsets(on: Any) -> None:
    gpu = on(version="2.13")
    rows = torch.randn(64, 100, device="cuda")
    offsets, lengths = torch.tensor([0, 10, 64]).cuda(), torch.tensor([10, 54]).cuda()
    assert gpu.of(lambda: torch.segment_reduce(rows, "sum", offsets=offsets)) == [800, 16, -16]
    # A zero before two lengths, and their prefix sum: 33 states of 16 B are 528, aligned twice.
    assert gpu.of(lambda: torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)) == [
        800, 8, 24, -8, 1279, -1279, -24,
    ]  # fmt: skip


def test_backward_of_overlapping_windows_allocates_indices(on: Any) -> None:
    gpu = on()
    for step, places in ((1, [40, -40]), (4, [])):
        x = torch.randn(5, 5, device="cuda", requires_grad=True)
        windows = x.unfold(1, 4, step)
        gradient = torch.ones_like(windows)
        events = gpu.of(lambda y=windows, x=x, g=gradient: torch.autograd.grad(y, x, g))
        assert events == [100, *places]
