"""Solvers: torch's own temporaries, in the order of its code on the dry device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

MATRIX, PIVOTS, PERMUTATION, CODE = 64 * 64 * 4, 64 * 4, 64 * 8, 4
BATCH, POINTERS = 3 * 16 * 16 * 4, 3 * 8
IS_FAILED = [1, 1, -1, -1]
"""Whether one code is an error: a flag, and whether any is."""

WORKSPACE = 8_519_680
"""cuBLAS's, taken once and kept."""

Call = Callable[[torch.Tensor], Any]


@pytest.mark.parametrize(
    ("call", "taken"),
    [
        (torch.linalg.cholesky, [MATRIX, CODE, *IS_FAILED, -CODE]),
        (torch.linalg.eigh, [MATRIX, PIVOTS, CODE, *IS_FAILED, -CODE]),
        (torch.linalg.svd, [MATRIX, MATRIX, PIVOTS, CODE, MATRIX, -MATRIX, *IS_FAILED, -CODE]),
        (torch.linalg.qr, [MATRIX, MATRIX, PIVOTS, CODE, -CODE, CODE, -CODE, -PIVOTS]),
        (torch.linalg.eigvalsh, [PIVOTS, MATRIX, CODE, *IS_FAILED, -CODE, -MATRIX]),
    ],
)
def test_results_and_temporaries_of_a_matrix(on: Any, call: Call, taken: list[int]) -> None:
    gpu = on("A100-40GB", "2.13")
    matrix = torch.eye(64, device="cuda")
    held: list[Any] = []
    assert gpu.of(lambda: held.append(call(matrix))) == taken


def test_an_inverse_copies_factorizes_permutes_and_solves(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    matrix = torch.eye(64, device="cuda")
    taken = [MATRIX, PIVOTS, PERMUTATION, PERMUTATION, PERMUTATION, MATRIX]
    freed = [-size for size in reversed(taken)]
    held: list[Any] = []
    events = gpu.of(lambda: held.append(torch.linalg.inv_ex(matrix)))
    assert events == [MATRIX, CODE, *taken, WORKSPACE, *freed]


def test_a_batch_passes_pointers_to_its_matrices(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    matrices = torch.eye(16, device="cuda").repeat(3, 1, 1)
    held: list[Any] = []
    events = gpu.of(lambda: held.append(torch.linalg.lu_factor(matrices)))
    pivots, codes = 3 * 16 * 4, 3 * 4
    assert events == [BATCH, pivots, codes, POINTERS, WORKSPACE, -POINTERS, 1, -1, -codes]


@pytest.mark.parametrize(
    ("rows", "sides", "way"),
    [
        (4, 2, "pointers"),
        (16, 16, "pointers"),
        (16, 2, "code"),
        (64, 64, "triangles"),
        (64, 128, "triangles"),
        (32, 64, "code"),
        (128, 2, "code"),
        (128, 3, "triangles"),
        (200, 1, "triangles"),
    ],
)
def test_factors_are_applied_as_sizes_say(on: Any, rows: int, sides: int, way: str) -> None:
    gpu = on("A100-40GB", "2.13")
    matrix, given = torch.eye(rows, device="cuda"), torch.ones(rows, sides, device="cuda")
    held = [torch.linalg.solve(matrix, given)]  # takes cuBLAS's workspace
    gpu.events()
    held.append(torch.linalg.solve(matrix, given))
    result, permutation = rows * sides * 4, rows * 8
    taken = {
        "pointers": [8, 8],
        "code": [4],
        "triangles": [permutation, permutation, permutation, result],
    }[way]
    # The result, the factors, pivots and a code of errors go before.
    before = [result, rows * rows * 4, rows * 4, 4]
    freed = [-size for size in reversed(taken)]
    events = [event for event in gpu.events() if abs(event) != WORKSPACE]
    assert events[: 4 + 2 * len(taken)] == [*before, *taken, *freed]


@pytest.mark.parametrize(("version", "turned"), [("2.10", True), ("2.11", False)])
def test_up_to_2_10_rows_are_factorized_as_columns(on: Any, version: str, turned: bool) -> None:
    gpu = on("A100-40GB", version)
    matrix, given = torch.eye(64, device="cuda"), torch.ones(64, 64, device="cuda")
    held = [torch.linalg.solve(matrix, given)]
    gpu.events()
    held.append(torch.linalg.solve(matrix, given))
    # Transposed factors are applied before the permutation.
    permutations = [PERMUTATION] if turned else [PERMUTATION] * 3
    assert gpu.events()[4 : 5 + len(permutations)] == [*permutations, MATRIX]
