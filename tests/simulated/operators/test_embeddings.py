"""Backward of embedding tables: sorted indices and sums of up to ten rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_gpumem.simulated.operators import cub

AMPERE = (8, 0)


def backward(
    gpu: Any, rows: int, width: int, count: int, dtype: torch.dtype = torch.float32
) -> list[int]:
    table = nn.Embedding(rows, width, dtype=dtype, device="cuda")
    indices = torch.zeros(count, dtype=torch.long, device="cuda")
    taken = table(indices)
    gradient = torch.ones_like(taken)
    return gpu.of(lambda: torch.autograd.grad(taken, table.weight, gradient))  # type: ignore[no-any-return]  # Watched


def test_few_indices_are_added_in_place(on: Any) -> None:
    gpu = on()
    assert backward(gpu, 5000, 64, 3072) == [5000 * 64 * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_indices(on: Any, dtype: torch.dtype) -> None:
    gpu = on("A100-40GB", "2.6")
    count, rows, width = 8192, 50_257, 768
    indices = count * 8
    sort = cub.radix_sort_pairs_bytes(count, 8, 8, 16, AMPERE)
    runs = cub.unique_by_key_bytes(count, 8, AMPERE, (2, 6))
    scan = cub.scan_bytes(count, 8, (2, 6))
    sums = count // 10 + count
    assert backward(gpu, rows, width, count, dtype) == [
        indices, indices, indices, sort, -sort, -indices,
        rows * width * dtype.itemsize,
        indices, 8, indices, runs, -runs, -indices,
        indices, indices, scan, -scan, 8,
        sums * 8, sums * width * 4, -sums * width * 4, -sums * 8,
        -8, -indices, -indices, -8, -indices, -indices, -indices,
    ]  # fmt: skip


def test_more_indices_than_rows(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    sums = 100_000 // 10 + 1000
    events = backward(gpu, 1000, 256, 100_000)
    assert sums * 256 * 4 in events
    assert events.count(1000 * 8) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_are_added_atomically_since_2_11(on: Any, dtype: torch.dtype) -> None:
    # A table of 200 rows: 200 blocks of 64 threads are less than 4 for each of 108 processors.
    sums = 10_000 // 10 + 200
    in_float = [200 * 64 * 4] if dtype == torch.bfloat16 else []
    events = backward(on("A100-40GB", "2.11"), 200, 64, 10_000, dtype)
    largest = events.index(sums * 8)
    assert events[largest : largest + 2 + len(in_float)] == [sums * 8, sums * 8, *in_float]
    assert sums * 64 * 4 not in events
    assert sums * 64 * 4 in backward(on("A100-40GB", "2.10"), 200, 64, 10_000, dtype)


def test_bags_are_added_in_the_same_way(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    table = torch.randn(5000, 64, device="cuda", requires_grad=True)
    indices = torch.zeros(100, 10, dtype=torch.long, device="cuda")
    bags = functional.embedding_bag(indices, table, mode="sum")
    gradient = torch.ones_like(bags)
    events = gpu.of(lambda: torch.autograd.grad(bags, table, gradient))
    assert events[:7] == [8000, 8000, 8000, 1, -1, -8000, 5000 * 64 * 4]
    assert (1000 // 10 + 1000) * 64 * 4 in events
