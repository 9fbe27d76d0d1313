"""Sorting, selecting and scanning, against recorded bytes and torch's sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def test_short_slices_are_sorted_in_place(on: Any) -> None:
    gpu = on()
    x = torch.randn(64, 4096, device="cuda")
    values, indices = 64 * 4096 * 4, 64 * 4096 * 8
    # The range of one slice is copied into the indices.
    assert gpu.of(lambda: x.sort()) == [values, indices, 4096 * 8, -4096 * 8]


def test_one_long_slice_is_sorted_by_radix_sort(on: Any) -> None:
    gpu = on("A100-40GB")
    x = torch.randn(100_000, device="cuda")
    assert gpu.of(lambda: x.sort()) == [400_000, 800_000, 800_000, 1_242_623, -1_242_623, -800_000]


def test_few_slices_are_sorted_as_one(on: Any) -> None:
    gpu = on("A100-40GB")
    x = torch.randn(64, 5000, device="cuda")
    n = 64 * 5000
    events = gpu.of(lambda: x.sort())
    pairs = events[5]
    keys = events[8]
    assert events == [
        4 * n, 8 * n,  # values, indices
        8 * n, 8 * n,  # index and slice of each element, twice
        4 * n, pairs, -pairs, -4 * n,  # sorted by value
        keys, -keys,  # then by slice: six bits, one pass
        -8 * n, -8 * n,
    ]  # fmt: skip
    assert pairs > 12 * n > keys


def test_many_slices_are_sorted_in_segments(on: Any) -> None:
    gpu = on()
    x = torch.randn(128, 5000, device="cuda")
    n = 128 * 5000
    copy = 12 * n + 255
    assert gpu.of(lambda: x.sort()) == [4 * n, 8 * n, 8 * n, copy, -copy, -8 * n]


def test_other_dims_are_moved_last_by_a_copy(on: Any) -> None:
    gpu = on()
    x = torch.randn(5000, 128, device="cuda")
    n = 128 * 5000
    events = gpu.of(lambda: x.sort(0))
    assert events[:5] == [4 * n, 8 * n, 4 * n, 4 * n, 8 * n]
    assert events[-3:] == [-8 * n, -4 * n, -4 * n]


def test_top_k_of_one_long_row(on: Any) -> None:
    # Constructor-Sun/code_location: topk of 32,555 floats in torch 2.8.
    gpu = on("A100-40GB", "2.8")
    x = torch.randn(32_555, device="cuda")
    assert gpu.of(lambda: x.topk(5)) == [
        20, 40,
        4, 4, 8, 8, 16_384, 128, 128, 1279, -1279, 1279, -1279,
        -128, -128, -16_384, -8, -8, -4, -4,
    ]  # fmt: skip


def test_top_k_of_a_short_row_allocates_its_results_alone(on: Any) -> None:
    # The same recording: 1,578 floats.
    gpu = on()
    x = torch.randn(1578, device="cuda")
    assert gpu.of(lambda: x.topk(5)) == [20, 40]


def test_cumulative_sum_of_one_row_has_the_recorded_storage(on: Any) -> None:
    # The same recording: two 64-bit integers.
    gpu = on("A100-40GB", "2.8")
    x = torch.zeros(2, dtype=torch.long, device="cuda")
    assert gpu.of(lambda: x.cumsum(0)) == [16, 1023, -1023]


def test_cumulative_sum_of_a_mask_converts_it(on: Any) -> None:
    gpu = on()
    mask = torch.ones(4, 128, dtype=torch.bool, device="cuda")
    assert gpu.of(lambda: mask.cumsum(-1)) == [4096, 4096, -4096]


def test_median_sorts_all_elements(on: Any) -> None:
    gpu = on()
    x = torch.randn(1000, device="cuda")
    assert gpu.of(lambda: x.median()) == [4000, 8000, 8000, -8000, -8000, 1, 4, -1, -4000]


def test_permutation_sorts_random_keys(on: Any) -> None:
    gpu = on()
    assert gpu.of(lambda: torch.randperm(1000, device="cuda")) == [
        8000,
        8, -8,  # whether the type of the result holds 1000
        8000, 4000, 4000, 1, -1, -4000, -4000, -8000,
    ]  # fmt: skip


def test_multinomial_of_one_sample_takes_an_argmax_of_noise(on: Any) -> None:
    gpu = on(version="2.13")
    weights = torch.ones(8, 1000, device="cuda")
    assert gpu.of(lambda: torch.multinomial(weights, 1)) == [
        64,
        4, 4, 1, 1, 1, -1, -1,  # extremes, whether they are valid
        32, 8, 1, -8, -32, 1, -1,  # whether a row has no weight
        32_000, -32_000,
        -1, -1, -4, -4,
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(64, 5000), (100_000,)], ids=str)
def test_kthvalue_allocates_its_results_alone(on: Any, shape: tuple[int, ...]) -> None:
    gpu = on()
    x = torch.randn(shape, device="cuda")
    events = gpu.of(lambda: x.kthvalue(5))
    rows = x.numel() // shape[-1]
    assert events == [4 * rows, 8 * rows]


def test_temporaries_of_an_operator_that_does_not_fit_are_freed(on: Any) -> None:
    on("T4")
    row = torch.empty(1, 5 * 2**30 // 4, device="cuda")
    held = torch.cuda.memory_allocated()
    # The copies of the values fit on a GPU of 16 GB, and their indices do not.
    with pytest.raises(torch.OutOfMemoryError):
        row.median()
    assert torch.cuda.memory_allocated() == held


def test_running_extremes_read_contiguous_elements(on: Any) -> None:
    gpu = on()
    x = torch.zeros(30, 40, device="cuda")
    assert gpu.of(lambda: x.cummax(0)) == [4800, 9600]
    assert gpu.of(lambda: x.t().cummin(0)) == [4800, 9600, 4800, -4800]


def test_a_prefix_sum_converts_what_it_reads(on: Any) -> None:
    gpu = on()
    truth = torch.zeros(30, 40, dtype=torch.bool, device="cuda")
    sums = 30 * 40 * 8
    assert gpu.of(lambda: truth.cumsum(0)) == [sums, sums, -sums]
    # The conversion is transposed as well, and copied; one of elements with gaps has none.
    assert gpu.of(lambda: truth.t().cumsum(0)) == [sums, sums, sums, -sums, -sums]
    wide = torch.zeros(30, 40, 2, dtype=torch.bool, device="cuda")
    assert gpu.of(lambda: wide[..., 0].cumsum(0)) == [sums, sums, -sums]


def test_nanmedian_counts_many_nan_by_several_blocks(on: Any) -> None:
    """As on the dry device with torch 2.11."""
    gpu = on("H100", "2.11")
    events = gpu.of(torch.randn(1_000_003, device="cuda").nanmedian)
    assert events[7:14] == [1_000_003, 8, 8_000_024, 984, 4, -4, -984]


def test_median_of_a_tensor_that_is_one_row_is_sorted_by_a_copy(on: Any) -> None:
    gpu = on()
    x = torch.zeros(100, 60, 2, device="cuda")[..., 0]
    size, indices = 6000 * 4, 6000 * 8
    events = gpu.of(x.median)
    # Sorted values and indices; the sort's copy, and its range of indices.
    assert events[:4] == [size, indices, size, indices]
    assert gpu.of(x.t().median)[:3] == [size, size, indices]


def test_a_logarithm_of_running_sums_fills_out(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    x, out = torch.ones(8, 1024, device="cuda"), torch.empty(0, device="cuda")
    assert gpu.of(lambda: torch.logcumsumexp(x, 1, out=out)) == [x.nbytes]
    assert gpu.of(lambda: torch.logcumsumexp(x, 1, out=out)) == []
