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
def test_sizes_decide_how_factors_are_applied(on: Any, rows: int, sides: int, way: str) -> None:
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


# Triangles.


@pytest.mark.parametrize(
    ("version", "count", "rows", "lists"),
    [
        ("2.15", 1, 63, 2),  # at once, with pointers
        ("2.15", 8, 64, 0),  # one after the other
        ("2.15", 9, 64, 2),
        ("2.10", 9, 513, 0),  # MAGMA's pointers are on the host
        ("2.11", 9, 513, 2),
    ],
)
def test_triangles_are_solved_one_by_one_or_with_pointers(
    on: Any, version: str, count: int, rows: int, lists: int
) -> None:
    gpu = on("A100-40GB", version)
    triangles = torch.zeros(count, rows, rows, device="cuda")
    sides = torch.zeros(count, rows, 2, device="cuda")
    held: list[Any] = []
    taken = gpu.of(lambda: held.append(torch.linalg.solve_triangular(triangles, sides, upper=True)))
    given = [8 * count] * lists
    assert taken == [sides.nbytes, *given, WORKSPACE, *(-size for size in given)]


def test_a_system_without_right_sides_has_no_pointers_of_them(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    triangles = torch.zeros(2, 3, 3, device="cuda")
    sides = torch.zeros(2, 3, 0, device="cuda")
    taken = gpu.of(lambda: torch.linalg.solve_triangular(triangles, sides, upper=True))
    assert taken == [2 * 8, WORKSPACE, -2 * 8]


def test_triangles_are_copied_for_each_batch_of_right_sides(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    triangle, sides = torch.zeros(5, 5, device="cuda"), torch.zeros(3, 5, 2, device="cuda")
    held: list[Any] = []
    taken = gpu.of(lambda: held.append(torch.linalg.solve_triangular(triangle, sides, upper=True)))
    assert taken == [120, 300, 24, 24, WORKSPACE, -24, -24, -300]
    # A matrix by columns, or by rows, is read as it is, a conjugate one, too.
    matrix = torch.zeros(3, 5, 5, dtype=torch.complex64, device="cuda")
    for given in (matrix, matrix.mH, matrix.conj()):
        of_complex = torch.zeros(3, 5, 2, dtype=torch.complex64, device="cuda")
        gpu.events()
        held.append(torch.linalg.solve_triangular(given, of_complex, upper=True))
        assert gpu.events() == [240, 24, 24, -24, -24]


# With factors that are there.


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        ("2.15", [24, 24, WORKSPACE, -24, -24, 24, 24, -24, -24]),  # by two triangles
        ("2.11", [300, WORKSPACE, -300]),  # by MAGMA, in a copy of the factors
    ],
)
def test_cholesky_solve_of_batches(on: Any, version: str, taken: list[int]) -> None:
    gpu = on("A100-40GB", version)
    factors = torch.eye(5, device="cuda").repeat(3, 1, 1)
    sides = torch.zeros(3, 5, 2, device="cuda")
    held: list[Any] = []
    assert gpu.of(lambda: held.append(torch.cholesky_solve(sides, factors))) == [120, *taken]
    # An inverse is a solution for ones, with a copy of the factors: MAGMA's own up to 2.11.
    gpu.events()
    held.append(torch.cholesky_inverse(factors))
    inner = [event for event in taken if abs(event) not in (WORKSPACE, 300)]
    assert gpu.events() == [300, 300, *inner, -300]


@pytest.mark.parametrize(
    ("version", "solved", "inverted"),
    [
        ("2.15", [40, CODE, 100, -100, -CODE], [100, 100, CODE, 100, -100, -CODE, -100]),
        ("2.11", [CODE, 40, 100, -100, -CODE], [100, 100, CODE, -CODE, -100]),
    ],
)
def test_cholesky_solve_of_one_matrix(
    on: Any, version: str, solved: list[int], inverted: list[int]
) -> None:
    gpu = on("A100-40GB", version)
    factor, sides = torch.eye(5, device="cuda"), torch.zeros(5, 2, device="cuda")
    held: list[Any] = []
    assert gpu.of(lambda: held.append(torch.cholesky_solve(sides, factor))) == solved
    assert gpu.of(lambda: held.append(torch.cholesky_inverse(factor))) == inverted


def test_broadcast_factors_are_copied_with_their_pivots(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    factors = torch.linalg.lu_factor(torch.eye(5, device="cuda"))
    sides = torch.zeros(3, 5, 2, device="cuda")
    held: list[Any] = []
    taken = gpu.of(lambda: held.append(torch.linalg.lu_solve(*factors, sides)))
    copies = [3 * 100, 3 * 5 * CODE]
    assert taken == [120, *copies, 24, 24, WORKSPACE, -24, -24, -copies[1], -copies[0]]


def test_right_sides_that_are_vectors_are_matrices_of_one_column(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    matrix, vector = torch.eye(5, device="cuda"), torch.ones(5, device="cuda")
    held: list[Any] = []
    taken = gpu.of(lambda: held.append(torch.linalg.solve_ex(matrix, vector)))
    assert taken == [20, 100, 20, CODE, 20, 8, 8, WORKSPACE, -8, -8, -20, -100, -20]


def test_an_indefinite_factor_takes_pivots_of_64_bits(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    factors = torch.zeros(2, 5, 5, device="cuda")
    pivots = torch.ones(2, 5, dtype=torch.int32, device="cuda")
    held: list[Any] = []
    taken = gpu.of(lambda: held.append(torch.linalg.ldl_solve(factors, pivots, factors)))
    assert taken == [200, 200, 80, CODE, -CODE, -80, -200]


# Least squares.


@pytest.mark.parametrize(
    ("shape", "sides", "taken"),
    [
        # Tall: geqrf, ormqr and a triangular solve; the residuals are summed.
        ((600, 16), 3, [64, *[CODE, -CODE] * 2, 8, 8, WORKSPACE, -8, -8, -64, 12]),
        # Wide: of the transposed one, the triangle first.
        (
            (16, 600),
            3,
            [64, 38400, CODE, -CODE, 8, 8, WORKSPACE, -8, -8, CODE, -CODE, -38400, -64],
        ),
        # A batch of small ones: cuBLAS, in another copy.
        ((3, 5, 5), 2, [300, 24, 24, WORKSPACE, -24, -24, -300]),
    ],
)
def test_least_squares(on: Any, shape: tuple[int, ...], sides: int, taken: list[int]) -> None:
    gpu = on("A100-40GB", "2.15")
    matrix = torch.zeros(shape, device="cuda")
    given = torch.zeros(*shape[:-1], sides, device="cuda")
    count = matrix.shape[:-2].numel()
    room = count * max(shape[-2:]) * sides * 4
    held: list[Any] = []
    events = gpu.of(lambda: held.append(torch.linalg.lstsq(matrix, given)))
    assert all(part.is_cuda for part in held[0])
    codes, flags = count * CODE, IS_FAILED if count == 1 else [1, -1]
    assert events == [codes, room, matrix.nbytes, *taken, -matrix.nbytes, *flags, -codes]
    assert held[0].solution.shape == (*shape[:-2], shape[-1], sides)
    assert held[0].residuals.shape == ((sides,) if shape[-2] > shape[-1] else (0,))


def test_lstsq_has_one_driver_on_a_gpu(on: Any) -> None:
    on()
    matrix = torch.zeros(5, 5, device="cuda")
    with pytest.raises(RuntimeError, match="`driver` other than `gels` is not supported on CUDA"):
        torch.linalg.lstsq(matrix, matrix, driver="gelsd")


# Determinants.


@pytest.mark.parametrize(
    ("dtype", "absolute"), [(torch.float32, [60]), (torch.complex64, [60, 120])]
)
def test_logarithms_of_determinants(on: Any, dtype: torch.dtype, absolute: list[int]) -> None:
    gpu = on("A100-40GB", "2.15")
    matrices = torch.zeros(3, 5, 5, dtype=dtype, device="cuda")
    size = dtype.itemsize
    held: list[Any] = []
    results = [3 * size, 12, 75 * size, 15 * CODE]
    swaps = [5 * CODE, 15, 3 * 8, 15 * 8, -15 * 8, -15, -5 * CODE]
    signs = [15 * size, 3 * size, -3 * size, -15 * size, -3 * 8]
    assert gpu.of(lambda: held.append(torch.linalg.slogdet(matrices))) == [
        *results, 12, 24, WORKSPACE, -24, *swaps, *signs,
        *absolute, *(-each for each in reversed(absolute)), -12, -75 * size, -15 * CODE,
    ]  # fmt: skip
