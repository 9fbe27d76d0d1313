"""Sorted index_put: temporaries as recorded on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpumem.simulated.operators.cub import alias_temporaries, radix_sort_pairs_bytes


def test_backward_of_a_lookup_by_index(on: Any) -> None:
    # NiuHuangxiaozi/assignment2-systems, forward and backward, context 100.
    gpu = on("RTX-4060", "2.6")
    table = torch.randn(10_000, 512, device="cuda", requires_grad=True)
    rows = table[torch.zeros(10, 100, dtype=torch.long, device="cuda")]
    gradient = torch.ones_like(rows)
    events = gpu.of(lambda: rows.backward(gradient))
    assert events[:13] == [
        20_480_000,  # the gradient, zeroed
        8000, 8000, -8000,  # remainder, times the stride
        8000, 8000, 8000,  # sorted and original indices, range
        1, -1,  # one block sorts a thousand pairs
        -8000, -8000, -8000, -8000,
    ]  # fmt: skip


def test_index_put_without_accumulation_needs_nothing(on: Any) -> None:
    gpu = on()
    table = torch.zeros(100, 8, device="cuda")
    where = torch.zeros(10, dtype=torch.long, device="cuda")
    rows = torch.ones(10, 8, device="cuda")
    assert gpu.of(lambda: table.index_put_((where,), rows)) == []


@pytest.mark.parametrize(
    ("count", "capability", "tile"),
    [(100_000, (7, 0), 256 * 11), (100_000, (8, 0), 384 * 10), (100_000, (9, 0), 384 * 12)],
)
def test_onesweep_storage(count: int, capability: tuple[int, int], tile: int) -> None:
    blocks = -(-count // tile)
    expected = alias_temporaries(2 * 256 * 8, blocks * 256 * 4, count * 8, count * 8, 8)
    assert radix_sort_pairs_bytes(count, 8, 8, 14, capability) == expected


def test_where_makes_a_tensor_of_its_number(on: Any) -> None:
    gpu = on()
    mask = torch.ones(16, dtype=torch.bool, device="cuda")
    values = torch.ones(16, device="cuda")
    assert gpu.of(lambda: torch.where(mask, values, 0.0)) == [4, 64, -4]
