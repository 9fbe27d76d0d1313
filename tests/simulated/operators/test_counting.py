"""unique, bincount and histc: their sorts, scans and reads, and the storage of their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.operators import cub

COUNT = 60_000
INDICES = COUNT * 8
SELECTION = cub.unique_bytes(COUNT, (8, 0), (2, 9))
SCAN = cub.scan_bytes(COUNT, 4, (2, 9))
LENGTH = 8


def known() -> torch.Tensor:
    return torch.arange(COUNT, device="cuda") // 3


def test_the_result_of_unique_keeps_a_storage_of_the_inputs_size(on: Any) -> None:
    gpu = on("A100-40GB", "2.9")
    numbers = known()
    storage = cub.radix_sort_pairs_bytes(COUNT, 8, 0, 64, (8, 0))
    before = torch.cuda.memory_allocated()
    gpu.events()
    found = torch.unique(numbers)
    assert gpu.events() == [
        INDICES, storage, -storage, INDICES, LENGTH, SELECTION, -SELECTION, -LENGTH, -INDICES,
    ]  # fmt: skip
    assert found.tolist() == list(range(COUNT // 3))
    # resize_ of a smaller size gives nothing back: 480,000 bytes in blocks of 512.
    assert torch.cuda.memory_allocated() - before == 480_256
    del found
    assert torch.cuda.memory_allocated() == before


def test_unique_returns_inverse_and_counts(on: Any) -> None:
    gpu = on("A100-40GB", "2.9")
    numbers = known()
    storage = cub.radix_sort_pairs_bytes(COUNT, 8, 8, 64, (8, 0))
    events = gpu.of(lambda: torch.unique(numbers, return_inverse=True, return_counts=True))
    assert events[:6] == [INDICES, INDICES, INDICES, storage, -storage, -INDICES]
    assert events[6:12] == [INDICES, INDICES, SCAN, -SCAN, -INDICES, -INDICES]
    assert events[12:] == [
        INDICES, INDICES, INDICES,
        LENGTH, SELECTION, -SELECTION, -LENGTH, -INDICES, -INDICES,
    ]  # fmt: skip


def test_the_gradient_of_a_number_that_is_filled_in_looks_for_distinct_places(on: Any) -> None:
    gpu = on()
    places = known()
    assert gpu.of(lambda: torch._unique(places)) == gpu.of(lambda: torch.unique(places))
    # Without a tag that values decide their number, torch up to 2.11 refuses shapes alone.
    number = torch.ones((), device="cuda", requires_grad=True)
    torch.zeros(COUNT, device="cuda").index_fill(0, places, number).sum().backward()
    assert number.grad is not None


def test_consecutive_values_are_not_sorted(on: Any) -> None:
    gpu = on("A100-40GB", "2.9")
    numbers = known()
    events = gpu.of(lambda: torch.unique_consecutive(numbers))
    assert events == [INDICES, LENGTH, SELECTION, -SELECTION, -LENGTH]


def test_unique_of_booleans_counts_instead_of_sorting(on: Any) -> None:
    gpu = on("A100-40GB", "2.9")
    truth = known() > 4
    events = gpu.of(lambda: torch.unique(truth, return_counts=True))
    sums = cub.device_sum_bytes(COUNT, 108, 2048)
    assert events == [4, sums, -sums, 2, 16, -4]


def test_estimated_storage_of_cub_is_noted() -> None:
    with simulate("A100-40GB", torch_version="2.9") as gpu:
        torch.unique(known())
        assert any("CUB's workspace for a selection" in note for note in gpu.notes)


@pytest.mark.parametrize(
    ("release", "dtype", "looks", "last"),
    [
        ("2.12", torch.int64, [8, -8, 8, -8], []),
        ("2.12", torch.uint8, [1, -1], []),
        ("2.13", torch.int64, [8, 8], [-8, -8]),
        ("2.13", torch.uint8, [1, 1], [-1, -1]),
    ],
)
def test_bincount_reads_the_minimum_and_the_maximum(
    on: Any, release: str, dtype: torch.dtype, looks: list[int], last: list[int]
) -> None:
    gpu = on(version=release)
    numbers = (torch.arange(100, device="cuda") // 10).to(dtype)
    assert gpu.of(lambda: torch.bincount(numbers)) == [*looks, 10 * 8, *last]


@pytest.mark.parametrize(("release", "looks"), [("2.11", [4, -4, 4, -4]), ("2.13", [4, 4, -4, -4])])
def test_histc_without_a_range_reads_both_extremes(on: Any, release: str, looks: list[int]) -> None:
    gpu = on(version=release)
    numbers = torch.rand(100, device="cuda")
    assert gpu.of(lambda: torch.histc(numbers, 10)) == [40, *looks]
    assert gpu.of(lambda: torch.histc(numbers, 10, 0, 1)) == [40]


@pytest.mark.parametrize(
    ("release", "copied"),
    [("2.11", [4, 360, -360, -4] * 2), ("2.15", [4, 4, 360, -360, -4, -4])],
)
def test_extremes_of_numbers_with_gaps_are_read_from_a_copy(
    on: Any, release: str, copied: list[int]
) -> None:
    gpu = on(version=release)
    numbers = torch.rand(10, 10, device="cuda")[:, 1:]
    assert gpu.of(lambda: torch.histc(numbers, 10)) == [40, *copied]


def test_bincount_reads_extremes_of_a_column_from_a_copy(on: Any) -> None:
    gpu = on(version="2.15")
    numbers = torch.zeros(10, 5, dtype=torch.long, device="cuda")[:, 1]
    assert gpu.of(lambda: torch.bincount(numbers)) == [8, 8, 80, -80, 8, -8, -8]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("real_values", [False, True])
@pytest.mark.parametrize(
    ("bins", "low", "high", "counts"),
    [
        pytest.param(4, 0, 3, [2, 1, 0, 2], id="one bin for each number"),  # 7 is outside
        # (n - 1) * 3 // 6 of 1, 3, 3 and 7; the last bin takes its upper end, too.
        pytest.param(3, 1, 7, [1, 2, 1], id="wider bins"),
        pytest.param(2, 0, 0, [5, 1], id="from the least to the largest"),  # n * 2 // 7
    ],
)
def test_histc_counts_integers(
    dtype: torch.dtype, real_values: bool, bins: int, low: int, high: int, counts: list[int]
) -> None:
    with simulate("T4", real_values=real_values):
        numbers = torch.tensor([0, 0, 1, 3, 3, 7], device="cuda", dtype=dtype)
        found = torch.histc(numbers, bins=bins, min=low, max=high)
        assert found.dtype is dtype
        assert found.tolist() == counts


def test_unique_of_booleans_sums_before_allocating_results(on: Any) -> None:
    gpu = on("A100-40GB")
    truth = torch.zeros(5000, dtype=torch.bool, device="cuda")
    # One sum of each block of five waves; values and counts of at most two, the inverse last.
    sums = cub.device_sum_bytes(5000, 108, 2048)
    events = gpu.of(lambda: torch.unique(truth, return_inverse=True, return_counts=True))
    assert events == [4, sums, -sums, 2, 16, 5000 * 8, -4]
