"""What is built from other operators takes what they take."""

from __future__ import annotations

from typing import Any

import torch

WORKSPACE = 8_519_680
"""cuBLAS's, before Hopper."""


def test_many_rows_are_compared_by_a_product(on: Any) -> None:
    gpu = on()
    x, y = torch.randn(64, 32, device="cuda"), torch.randn(48, 32, device="cuda")
    x_bytes, x_column, x_wide = 64 * 32 * 4, 64 * 4, 64 * 34 * 4
    y_bytes, y_column, y_wide = 48 * 32 * 4, 48 * 4, 48 * 34 * 4
    assert gpu.of(lambda: torch.cdist(x, y)) == [
        x_bytes, x_column, -x_bytes,  # squares and their sum
        x_column,  # ones
        y_bytes, y_column, -y_bytes,
        y_column,
        x_bytes, x_wide,  # minus two x; beside sums and ones, which end with the list of the three
        -x_column, -x_column, -x_bytes,
        y_wide, -y_column, -y_column,
        64 * 48 * 4, WORKSPACE,
        -y_wide, -x_wide,
    ]  # fmt: skip


def test_few_rows_are_compared_by_a_kernel(on: Any) -> None:
    gpu = on()
    x = torch.randn(25, 32, device="cuda")
    assert gpu.of(lambda: torch.cdist(x, x)) == [25 * 25 * 4]


def test_infinities_are_looked_for_in_absolute_values(on: Any) -> None:
    gpu = on()
    x = torch.randn(64, 32, device="cuda")
    assert gpu.of(lambda: torch.isinf(x)) == [64 * 32 * 4, 64 * 32, -64 * 32 * 4]
    assert gpu.of(lambda: torch.isinf(x.int())) == [64 * 32 * 4, 64 * 32, -64 * 32 * 4]


def test_a_distance_is_the_norm_of_a_difference(on: Any) -> None:
    gpu = on()
    x, y = (torch.randn(16, 16, device="cuda") for _ in range(2))
    assert gpu.of(lambda: torch.dist(x, y)) == [1024, 4, -1024]
