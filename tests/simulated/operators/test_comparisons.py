"""Comparisons of whole tensors, and searches among sorted numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ROW, FLAGS = 400, 100


def test_isclose_with_equal_nan_combines_flags_in_place(on: Any) -> None:
    gpu = on()
    x, y = (torch.randn(100, device="cuda") for _ in range(2))
    equal = [FLAGS, FLAGS, FLAGS, -FLAGS, -FLAGS]
    assert gpu.of(lambda: torch.isclose(x, y, 0, 0, equal_nan=True)) == equal
    assert gpu.of(lambda: torch.isclose(x, y, equal_nan=True)) == [
        *equal,
        ROW, ROW, ROW, -ROW, -ROW,  # atol + (rtol * y).abs()
        ROW, ROW, -ROW,  # (x - y).abs()
        ROW, FLAGS, FLAGS, FLAGS, -FLAGS, -FLAGS, -ROW,  # isfinite: abs, ne, eq, and their product
        FLAGS, -FLAGS, -FLAGS,
        -ROW, -ROW,
    ]  # fmt: skip


def test_equal_compares_known_values(on: Any) -> None:
    gpu = on()
    x, y = torch.arange(100).cuda(), torch.arange(100).cuda()
    answers: list[bool] = []
    assert gpu.of(lambda: answers.append(torch.equal(x, y))) == [FLAGS, 1, -1, -FLAGS]
    assert gpu.of(lambda: answers.append(torch.equal(x, x))) == []
    assert answers == [True, True]


def test_equal_compares_shapes_and_storages_without_values(on: Any) -> None:
    on()
    x = torch.rand(100, device="cuda")
    assert torch.equal(x, x[:])
    assert not torch.equal(x, x[1:])
    assert torch.equal(x[:0], torch.rand(0, device="cuda"))
    narrow = x.to(torch.float8_e4m3fn)  # the CPU has no kernel for it
    assert torch.equal(narrow, narrow)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.equal(x, torch.ones(3))


def test_isin_compares_few_test_elements_with_all(on: Any) -> None:
    gpu = on()
    x, few = torch.randn(20, device="cuda"), torch.randn(5, device="cuda")
    # 5 is below 10 · 20^0.145, which is 15: 100 pairs, and whether one of five is equal.
    assert gpu.of(lambda: torch.isin(x, few)) == [20, 100, 20, -20, -100]
    # A number becomes a tensor of 64 bits.
    assert gpu.of(lambda: torch.isin(7, few)) == [8, 1, 5, 1, -1, -5, -8]


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
def test_searchsorted_casts_values_to_the_dtype_of_the_sequence(on: Any) -> None:
    gpu = on()
    ordered = torch.arange(100, dtype=torch.float32).cuda()
    x = torch.randn(8, 100, device="cuda")
    found = 8 * 100 * 8
    assert gpu.of(lambda: torch.searchsorted(ordered, x)) == [found]
    assert gpu.of(lambda: torch.searchsorted(ordered, x.t())) == [found, 3200, -3200]
    assert gpu.of(lambda: torch.searchsorted(ordered, 0.5)) == [8, 8, 4, -4, -8]
    if torch.__version__ >= "2.11":  # 2.6 to 2.10 read the number on meta
        assert gpu.of(lambda: torch.bucketize(0.5, ordered)) == [8, 8, 4, -4, -8]
    numbers = torch.arange(100).cuda()
    assert gpu.of(lambda: torch.searchsorted(numbers, 0.5)) == [8, 8, 4, 400, -400, -4, -8]
