"""Factors, eigenvalues and singular values: torch's own temporaries, as on the dry device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CODE, POINTER, PIVOT, INDEX = 4, 8, 4, 8
WORKSPACE = 8_519_680
"""cuBLAS's, taken once and kept."""
COUNT = 3


def _passing(*sizes: int) -> list[int]:
    return [*sizes, *(-size for size in reversed(sizes))]


def _matrices(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(COUNT, rows, columns, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("dtype", "count", "largest"),
    [
        (torch.float32, 2, 129),  # of 2 * 8400 elements
        (torch.complex128, 2, 66),  # of 2 * 2200
        (torch.complex64, 3, 236),  # of 3 * 18600
        (torch.float64, 4, 364),  # of 4 * 2 * 16600
        (torch.complex128, 4, 203),  # of 4 * 2 * 5200
    ],
)
def test_small_batches_are_factorized_with_pointers(
    on: Any, dtype: torch.dtype, count: int, largest: int
) -> None:
    gpu = on("A100-40GB", "2.15")
    for rows, passing in ((largest, [count * POINTER]), (largest + 1, [])):
        matrices = torch.zeros(count, rows, rows, dtype=dtype, device="cuda")
        results = [matrices.nbytes, count * rows * PIVOT, count * CODE]
        held: list[Any] = []
        events = gpu.of(lambda: held.append(torch.linalg.lu_factor_ex(matrices)))  # noqa: B023
        events = [event for event in events if event != WORKSPACE]
        assert events == [*results, *_passing(*passing)]


@pytest.mark.parametrize(
    ("shape", "passing"),
    [
        ((1, 200, 200), []),
        ((16, 128, 128), [16 * POINTER, -16 * POINTER]),
        ((17, 16, 16), [17 * POINTER, -17 * POINTER]),
        ((17, 20, 20), [WORKSPACE]),
        ((2, 129, 129), [WORKSPACE]),
        ((4, 5), [WORKSPACE]),
    ],
)
def test_up_to_2_13_magma_factorizes_large_batches_and_rectangles(
    on: Any, shape: tuple[int, ...], passing: list[int]
) -> None:
    gpu = on("A100-40GB", "2.13")
    matrices = torch.zeros(shape, device="cuda")
    held: list[Any] = []
    events = gpu.of(lambda: held.append(torch.linalg.lu_factor_ex(matrices)))[3:]
    assert events[:1] + [event for event in events[1:] if event != WORKSPACE] == passing


def test_lu_factorizes_a_temporary_copy(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    wide = _matrices(3, 5)
    permuted, lower, upper = COUNT * 9 * 4, COUNT * 9 * 4, COUNT * 15 * 4
    pivots, codes, places = COUNT * 3 * PIVOT, COUNT * CODE, 3 * INDEX
    held: list[Any] = []
    events = gpu.of(lambda: held.append(torch.linalg.lu(wide)))
    assert events == [
        permuted, lower, upper,
        upper, pivots, codes, -upper,
        places, COUNT * places, -places, -COUNT * places,
        -codes, -pivots,
    ]  # fmt: skip
    held.append(torch.linalg.lu_factor(wide))
    events = gpu.of(lambda: held.append(torch.lu_unpack(*held[-1])))
    assert events == [
        permuted, lower, upper, places, COUNT * places, -places, -COUNT * places,
    ]  # fmt: skip
    single = gpu.of(lambda: held.append(torch.linalg.lu(wide[0], pivot=False)))
    # Pivots that are none are counted from one.
    assert single == [36, 60, 60, 12, CODE, 12, -12, -60, -CODE, -12]


def test_svdvals_allocates_vectors_too(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    for rows, columns, left, right in (
        (32, 20, COUNT * 32 * 32, COUNT * 20 * 20),  # gesvdjBatched
        (64, 40, 64 * 40, 40 * 40),  # gesvdj, of one matrix
    ):
        matrices = _matrices(rows, columns)
        values, codes = COUNT * columns * 4, COUNT * CODE
        assert gpu.of(lambda: torch.linalg.svdvals(matrices)) == [  # noqa: B023
            values, codes, *_passing(matrices.nbytes, left * 4, right * 4), 1, -1, -codes,
        ]  # fmt: skip


def test_singular_vectors_of_small_matrices_are_square(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    tall = _matrices(5, 4)
    held: list[Any] = []
    events = gpu.of(lambda: held.append(torch.linalg.svd(tall, full_matrices=False)))
    codes, square = COUNT * CODE, COUNT * 5 * 5 * 4
    assert events == [
        tall.nbytes, COUNT * 16 * 4, COUNT * 4 * 4,
        codes, *_passing(tall.nbytes, square), 1, -1, -codes,
    ]  # fmt: skip
    of_driver = gpu.of(lambda: torch.linalg.svdvals(_matrices(40, 64), driver="gesvda"))
    assert of_driver[3:7] == [COUNT * size * 4 for size in (40 * 64, 40 * 64, 40 * 40)] + [
        -COUNT * 40 * 40 * 4
    ]


def test_complex_right_singular_vectors_are_conjugate_views(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    right = torch.linalg.svd(_matrices(4, 4, torch.complex64))[2]
    assert right.is_conj()
    # A read resolves the conjugation first.
    assert gpu.of(lambda: right + 1) == [right.nbytes, right.nbytes, -right.nbytes]


def test_qr_allocates_a_code_or_pointers(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    matrices = _matrices(5, 4)
    scales = COUNT * 4 * 4
    held: list[Any] = []
    events = gpu.of(lambda: held.append(torch.geqrf(matrices)))
    assert events == [
        matrices.nbytes, scales, COUNT * POINTER, COUNT * POINTER, WORKSPACE,
        -COUNT * POINTER, -COUNT * POINTER,
    ]  # fmt: skip
    single, taus = matrices[0], torch.zeros(4, device="cuda")
    gpu.events()
    assert gpu.of(lambda: held.append(torch.geqrf(single))) == [80, 16, CODE, -CODE]
    product = gpu.of(lambda: held.append(torch.linalg.householder_product(single, taus)))
    assert product == [80, CODE, -CODE]
    # Reflections by rows are copied.
    assert gpu.of(lambda: held.append(torch.ormqr(single, taus, single))) == [
        80, 80, CODE, -CODE, -80,
    ]  # fmt: skip
    # The upper triangle alone is cut out of a copy.
    upper = gpu.of(lambda: held.append(torch.linalg.qr(single, mode="r")))
    assert upper == [64, 16, 80, CODE, -CODE, -80, -16]


def test_eigenvalues_of_real_matrices_begin_as_two_real_vectors(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    matrices = _matrices(5, 5)
    flags, codes = COUNT * 25, COUNT * CODE
    values, vectors = COUNT * 5 * 8, COUNT * 25 * 8
    finite = [4 * flags, flags, flags, flags, -flags, -flags, -4 * flags, 1, -1, -flags]
    held: list[Any] = []
    assert gpu.of(lambda: held.append(torch.linalg.eig(matrices))) == [
        *finite,
        codes, vectors, values, values, *[4 * flags, 4 * flags, -4 * flags],
        COUNT * 5, 1, -1, -COUNT * 5, -4 * flags, -values,
        values, vectors, -vectors, -values, 1, -1, -codes,
    ]  # fmt: skip


def test_eigenvalues_of_complex_matrices_are_copied(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    matrices = _matrices(5, 5, torch.complex64)
    codes, values, vectors = COUNT * CODE, COUNT * 5 * 8, COUNT * 25 * 8
    held: list[Any] = []
    events = gpu.of(lambda: held.append(torch.linalg.eig(matrices)))
    assert events[-11:] == [
        codes, vectors, values, vectors, -vectors,
        values, vectors, -vectors, -values, 1, -1, -codes,
    ][-11:]  # fmt: skip
    # Of values alone no one asks whether the matrix is finite.
    assert gpu.of(lambda: held.append(torch.linalg.eigvals(matrices))) == [
        codes, values, vectors, -vectors, values, -values, 1, -1, -codes,
    ]  # fmt: skip


def test_in_2_6_magma_computes_eigenvalues_on_the_host(on: Any) -> None:
    gpu = on("A100-40GB", "2.6")
    matrices = _matrices(5, 5)
    held: list[Any] = []
    events = gpu.of(lambda: held.append(torch.linalg.eig(matrices)))
    assert events[10:] == [COUNT * 5 * 8, COUNT * 25 * 8]
