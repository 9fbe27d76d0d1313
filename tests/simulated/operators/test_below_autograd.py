"""Composite operators make the allocations of the operators that they call."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

WORKSPACE = 8_519_680
"""cuBLAS's, before Hopper."""


def test_cdist_of_many_rows_is_a_matrix_product(on: Any) -> None:
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


def test_cdist_of_few_rows_is_one_kernel(on: Any) -> None:
    gpu = on()
    x = torch.randn(25, 32, device="cuda")
    assert gpu.of(lambda: torch.cdist(x, x)) == [25 * 25 * 4]


def test_isinf_takes_absolute_values(on: Any) -> None:
    gpu = on()
    x = torch.randn(64, 32, device="cuda")
    assert gpu.of(lambda: torch.isinf(x)) == [64 * 32 * 4, 64 * 32, -64 * 32 * 4]
    assert gpu.of(lambda: torch.isinf(x.int())) == [64 * 32 * 4, 64 * 32, -64 * 32 * 4]


def test_a_distance_is_the_norm_of_a_difference(on: Any) -> None:
    gpu = on()
    x, y = (torch.randn(16, 16, device="cuda") for _ in range(2))
    assert gpu.of(lambda: torch.dist(x, y)) == [1024, 4, -1024]


def test_affine_grid_is_a_product_of_coordinates(on: Any) -> None:
    gpu = on()
    theta = torch.randn(8, 2, 3, device="cuda")
    base, line = 8 * 64 * 32 * 3 * 4, [64 * 4, 64 * 4, 64 * 4, -64 * 4, -64 * 4, -64 * 4]
    column = [nbytes // 2 for nbytes in line]
    # Each line of coordinates is moved to the centres of the pixels, in two steps.
    assert gpu.of(lambda: functional.affine_grid(theta, [8, 3, 32, 64], align_corners=False)) == [
        base, *line, *column, 8 * 64 * 32 * 2 * 4, WORKSPACE, -base,
    ]  # fmt: skip


def test_powers_of_two_are_a_tensor(on: Any) -> None:
    gpu = on()
    x = torch.randn(16, 16, device="cuda")
    # Two itself is copied to the GPU as a double.
    assert gpu.of(lambda: torch.ldexp(x, x)) == [1024, 8, -8, 1024, -1024]


def test_the_multivariate_gamma_function_sums_over_its_dims(on: Any) -> None:
    gpu = on()
    x = torch.randn(16, 16, device="cuda")
    assert gpu.of(lambda: torch.mvlgamma(x, 3)) == [12, 3 * 1024, -12, 1024, -3 * 1024]


def test_functional_overloads_copy_what_is_written_first(on: Any) -> None:
    """They are generated: copies, then the operator that writes to them."""
    gpu = on()
    x, weight = torch.randn(4, 8, 16, 16, device="cuda"), torch.ones(8, device="cuda")
    mean, deviation = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    given = (x, weight, weight, mean, deviation)
    run = torch.ops.aten._native_batch_norm_legit_functional
    kept: list[Any] = []
    events = gpu.of(lambda: kept.append(run(*given, True, 0.1, 1e-5)))
    assert events == [32, 32, x.nbytes, 32, 32]
