"""Backward of embedding tables: sorted indices and sums of up to ten rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_gpumem import simulate
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
    sort = cub.radix_sort_pairs_bytes(count, 8, 8, 64, AMPERE)
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


@pytest.mark.parametrize(("release", "sort"), [("2.11", 83_455), ("2.13", 71_167)])
def test_indices_are_sorted_by_the_bits_of_a_row_since_2_13(
    on: Any, release: str, sort: int
) -> None:
    """83,455 bytes were recorded on an H100 with torch 2.11, both on the dry device."""
    assert backward(on("H100", release), 30_000, 256, 4096)[3] == sort


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


def test_bags_have_the_backward_of_embeddings(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    table = torch.randn(5000, 64, device="cuda", requires_grad=True)
    indices = torch.zeros(100, 10, dtype=torch.long, device="cuda")
    bags = functional.embedding_bag(indices, table, mode="sum")
    gradient = torch.ones_like(bags)
    events = gpu.of(lambda: torch.autograd.grad(bags, table, gradient))
    assert events[:7] == [8000, 8000, 8000, 1, -1, -8000, 5000 * 64 * 4]
    assert (1000 // 10 + 1000) * 64 * 4 in events


def bag_losses(
    device: str, *, mode: str, sparse: bool, last: bool, padding: int | None, weighted: bool
) -> list[float]:
    """Return losses and gradients of two steps; the second bag is empty."""
    table = torch.nn.EmbeddingBag(
        10, 4, mode=mode, sparse=sparse, include_last_offset=last, padding_idx=padding
    )
    with torch.no_grad():
        table.weight.copy_(torch.arange(40.0).view(10, 4).sin())
    table = table.to(device)
    indices = torch.tensor([1, 2, 2, 5, 1, 9, 0, 3], device=device)
    offsets = torch.tensor([0, 3, 3, 6] + [8] * last, device=device)
    weights = torch.arange(1.0, 9.0, device=device).requires_grad_() if weighted else None
    kind: Any = torch.optim.SparseAdam if sparse else torch.optim.SGD
    optimizer = kind(table.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        loss = table(indices, offsets, per_sample_weights=weights).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert table.weight.grad is not None
        seen += [loss.item(), *table.weight.grad.to_dense().flatten().tolist()]
    return seen if weights is None or weights.grad is None else [*seen, *weights.grad.tolist()]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize(
    ("mode", "sparse", "weighted"),
    [
        *(("sum", False, False), ("sum", True, False), ("sum", False, True), ("sum", True, True)),
        *(("mean", False, False), ("mean", True, False), ("max", False, False)),
    ],
)
def test_bags_are_trained_with_real_values(
    mode: str, sparse: bool, weighted: bool, last: bool, padding: int | None
) -> None:
    case: Any = {
        "mode": mode,
        "sparse": sparse,
        "weighted": weighted,
        "last": last,
        "padding": padding,
    }
    expected = bag_losses("cpu", **case)
    with simulate("T4", real_values=True):
        found = bag_losses("cuda", **case)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_sparse_gradient_of_bags_has_a_row_for_each_index(on: Any, mode: str) -> None:
    gpu = on("A100-40GB", "2.13")
    table = torch.nn.EmbeddingBag(5000, 64, mode=mode, sparse=True).cuda()
    bags = table(torch.zeros(100, 10, dtype=torch.long, device="cuda"))
    gradient = torch.ones_like(bags)
    events = gpu.of(lambda: torch.autograd.grad(bags, table.weight, gradient, retain_graph=True))
    # The sizes of 100 bags, as numbers and inverted, and the share of each of 1000 rows.
    shares = [400, 400, 4000, -400, -400, -4000] if mode == "mean" else []
    assert events == [100 * 10 * 64 * 4, *shares]
