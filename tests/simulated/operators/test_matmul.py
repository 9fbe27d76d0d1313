"""Copies of operands that cuBLAS cannot read, and linear layers on strided inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from pytest_gpumem.simulated.operators import matmul
from pytest_gpumem.simulated.operators.tables import MAY_OVERRIDE

WORKSPACE = 8_519_680


def test_batched_operand_with_strided_rows_is_copied(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    weights = torch.randn(8, 64, 64, device="cuda")
    torch.bmm(weights, weights)
    strided = torch.randn(8, 64, 16, 2, device="cuda")[..., 0]
    copy = 8 * 64 * 16 * 4
    assert gpu.of(lambda: torch.bmm(weights, strided)) == [copy, copy, -copy]


@pytest.mark.skipif(not MAY_OVERRIDE, reason="torch 2.6 keeps its own kernels")
def test_batches_without_elements_may_have_two_types(on: Any) -> None:
    """As on the dry device with torch 2.15; with elements they may not."""
    gpu = on("A100-40GB", "2.15")
    halves = torch.zeros(2, 3, 4, device="cuda", dtype=torch.bfloat16)
    empty = torch.zeros(2, 0, 3, device="cuda")
    assert torch.bmm(empty, halves).dtype is torch.bfloat16
    assert gpu.of(lambda: torch.bmm(empty.mT, halves[:, :0])) == [2 * 3 * 4 * 2]
    with pytest.raises(RuntimeError, match="expected scalar type"):
        torch.bmm(torch.zeros(2, 1, 3, device="cuda"), halves)


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


def test_mv_copies_a_matrix_with_gaps_in_both_dims(on: Any) -> None:
    gpu = on()
    matrix, row = torch.randn(64, 64, device="cuda"), torch.randn(32, device="cuda")
    matrix[:, :32].mv(row)  # takes cuBLAS's workspace
    assert gpu.of(lambda: matrix[:, :32].mv(row)) == [256]
    assert gpu.of(lambda: matrix[::2].t()[:, :32].mv(row)) == [256]
    assert gpu.of(lambda: matrix[:, ::2].mv(row)) == [256, 64 * 32 * 4, -64 * 32 * 4]
    assert gpu.of(lambda: torch.addmv(row, matrix[::2, ::2], row)) == [128, 4096, -4096]


def test_a_conjugate_is_copied_unless_it_is_transposed(on: Any) -> None:
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


@pytest.mark.parametrize(("has_triton", "workspaces"), [(True, []), (False, [WORKSPACE])])
def test_a_product_of_columns_and_rows_runs_a_triton_kernel(
    on: Any, monkeypatch: pytest.MonkeyPatch, has_triton: bool, workspaces: list[int]
) -> None:
    """Torch 2.15.0+cu132 on the dry device, with Triton 3.9 and without."""
    monkeypatch.setattr(matmul, "_HAS_TRITON", has_triton)
    gpu = on("A100-40GB", "2.12")
    columns, rows = torch.ones(8, 64, 1, device="cuda"), torch.ones(8, 1, 16, device="cuda")
    assert gpu.of(lambda: torch.bmm(columns, rows)) == [8 * 64 * 16 * 4, *workspaces]


def test_a_product_of_columns_and_rows_with_out_is_one_of_cublas(on: Any) -> None:
    gpu = on("A100-40GB", "2.12")
    columns, rows = torch.ones(8, 64, 1, device="cuda"), torch.ones(8, 1, 16, device="cuda")
    product = torch.empty(8, 64, 16, device="cuda")
    assert gpu.of(lambda: torch.bmm(columns, rows, out=product)) == [WORKSPACE]


def test_a_batched_conjugate_is_copied_unless_it_is_transposed(on: Any) -> None:
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


LT, CUBLAS = 1 << 20, 32 << 20
"""Workspaces of cuBLASLt and cuBLAS on an H100 up to 2.11."""


def workspaces(gpu: Any, call: Any) -> list[int]:
    return [size for size in gpu.of(call) if size >= LT]


def test_a_linear_layer_of_one_row_has_two_workspaces_except_in_2_10(on: Any) -> None:
    # An H100 with 2.11: +33,554,432 +1,048,576 for 10-20-1 at batch 1; wheels on the dry device.
    for version, taken in {"2.9": [CUBLAS, LT], "2.10": [CUBLAS], "2.11": [CUBLAS, LT]}.items():
        gpu = on("H100", version)
        x, weight, bias = (torch.ones(s, device="cuda") for s in ((1, 8), (8, 8), (8,)))
        assert workspaces(gpu, lambda: functional.linear(x, weight, bias)) == taken  # noqa: B023


@pytest.mark.parametrize(
    ("shape", "activates", "taken"),
    [
        ((8,), False, [CUBLAS, LT]),
        ((1, 8), False, [CUBLAS, LT]),
        ((4, 8), False, [CUBLAS]),
        ((4, 8), True, [CUBLAS, LT]),
        ((4, 1), True, [CUBLAS, LT]),
        ((1,), True, [CUBLAS]),
    ],
)
def test_cublaslt_adds_contiguous_biases(
    on: Any, shape: tuple[int, ...], activates: bool, taken: list[int]
) -> None:
    gpu = on("H100", "2.11")
    x, weight = torch.ones(4, 8, device="cuda"), torch.ones(8, 8, device="cuda")
    bias = torch.ones(shape, device="cuda")
    product = torch._addmm_activation if activates else torch.addmm
    assert workspaces(gpu, lambda: product(bias, x, weight)) == taken


@pytest.mark.parametrize("rows", [(4, 1), (16, 1), (8, 2)])
def test_cublaslt_writes_only_contiguous_results(on: Any, rows: tuple[int, int]) -> None:
    gpu = on("H100", "2.11")
    x, weight = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda")
    out = torch.empty(64, device="cuda").as_strided((4, 4), rows)
    taken = [CUBLAS, LT] if out.is_contiguous() else [CUBLAS]
    assert workspaces(gpu, lambda: torch.addmm(weight[0], x, weight, out=out)) == taken


@pytest.mark.parametrize(
    ("rows", "strides", "by_lt"),
    [
        *[(4, (8, 1), True), (4, (16, 1), True)],
        *[(4, (0, 1), False), (4, (1, 4), False), (1, (8, 1), False)],
    ],
)
def test_addmm_of_halves_runs_cublaslt_since_2_14(
    on: Any, monkeypatch: pytest.MonkeyPatch, rows: int, strides: tuple[int, int], by_lt: bool
) -> None:
    # Torch 2.15.0+cu132 on the dry device, where each operation has a workspace of its own.
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE")
    gpu = on("H100", "2.15")
    added = torch.ones(64, device="cuda", dtype=torch.half).as_strided((rows, 8), strides)
    x = torch.ones(rows, 8, device="cuda", dtype=torch.half)
    weight = torch.ones(8, 8, device="cuda", dtype=torch.half)
    taken = workspaces(gpu, lambda: torch.addmm(added, x, weight, beta=2))
    assert taken == [LT if by_lt else CUBLAS]
