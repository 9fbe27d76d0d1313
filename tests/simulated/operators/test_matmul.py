"""Copies that cuBLAS needs of operands it cannot read, and linear layers on strided inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

WORKSPACE = 8_519_680


def test_batched_operand_with_strided_rows_is_copied(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    weights = torch.randn(8, 64, 64, device="cuda")
    torch.bmm(weights, weights)
    strided = torch.randn(8, 64, 16, 2, device="cuda")[..., 0]
    copy = 8 * 64 * 16 * 4
    assert gpu.of(lambda: torch.bmm(weights, strided)) == [copy, copy, -copy]


def test_expanded_gradient_is_copied_before_the_workspace(on: Any) -> None:
    # silmont2000/assignment2-systems: the gradient of sum() is one number expanded.
    gpu = on("A100-40GB", "2.6")
    one = torch.ones(8, 64, 64, device="cuda")
    spread = torch.ones((), device="cuda").expand(8, 64, 16)
    copy = 8 * 64 * 16 * 4
    assert gpu.of(lambda: torch.bmm(one, spread)) == [copy, copy, WORKSPACE, -copy]


def test_transposed_operands_are_read_in_place(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    a, b = torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda")
    torch.mm(a, b.t())
    assert gpu.of(lambda: torch.mm(a.t(), b)) == [64 * 64 * 4]


def test_bias_of_a_strided_input_is_added_in_place(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    x = torch.randn(8, 4, 16, device="cuda").transpose(0, 1)
    weight, bias = torch.randn(32, 16, device="cuda"), torch.randn(32, device="cuda")
    result = 4 * 8 * 32 * 4
    assert gpu.of(lambda: functional.linear(x, weight, bias)) == [result, WORKSPACE]


def test_a_vector_of_one_number_is_copied_for_the_product(on: Any) -> None:
    gpu = on()
    matrix = torch.randn(64, 32, device="cuda")
    row, number = torch.randn(32, device="cuda"), torch.ones((), device="cuda").expand(32)
    matrix.mv(row)  # takes cuBLAS's workspace
    assert gpu.of(lambda: matrix.mv(row)) == [256]
    assert gpu.of(lambda: matrix.mv(number)) == [256, 128, -128]


def test_a_conjugate_is_read_of_a_transposed_matrix_and_copied_of_others(on: Any) -> None:
    # cuBLAS has the conjugate transpose; a row-major result is computed transposed.
    gpu = on()
    a, b = (torch.zeros(64, 64, dtype=torch.complex64, device="cuda") for _ in range(2))
    size = 64 * 64 * 8
    torch.mm(a, b)  # takes cuBLAS's workspace
    assert gpu.of(lambda: torch.mm(a, b.mH)) == [size]
    assert gpu.of(lambda: torch.mm(a.conj(), b)) == [size, size, -size]
    assert gpu.of(lambda: torch.mm(a, b.conj())) == [size, size, -size]
    rows = torch.zeros(64, 128, dtype=torch.complex64, device="cuda")[:, :64]
    assert gpu.of(lambda: torch.mm(a, rows.mH)) == [size]
    assert gpu.of(lambda: torch.mm(a, rows.conj())) == [size, size, -size]
    columns = torch.zeros(64, 64, 2, dtype=torch.complex64, device="cuda")[..., 0]
    assert gpu.of(lambda: torch.mm(a, columns.mH)) == [size, size, -size]


def test_a_conjugate_of_batches_is_read_where_it_is_transposed(on: Any) -> None:
    gpu = on()
    a, b = (torch.zeros(4, 64, 64, dtype=torch.complex64, device="cuda") for _ in range(2))
    size = 4 * 64 * 64 * 8
    torch.bmm(a, b)
    assert gpu.of(lambda: torch.bmm(a, b.mH)) == [size]
    assert gpu.of(lambda: torch.bmm(a, b.conj())) == [size, size, -size]


def test_a_product_of_empty_vectors_takes_a_workspace(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    nothing = torch.empty(0, device="cuda")
    assert gpu.of(lambda: torch.dot(nothing, nothing)) == [4, 8_519_680]
