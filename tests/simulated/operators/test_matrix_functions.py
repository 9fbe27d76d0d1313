"""Functions of matrices that are built from other operators, as on the dry device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.operators.tables import MAY_OVERRIDE
from pytest_gpumem.values.errors import UnknownValueError

WORKSPACE = 8_519_680
MATRIX, PARTS = 4 * 4 * 4, 8
"""A matrix of four rows, and what one norm of it takes as an index."""


def _events(call: Callable[[], Any], version: str = "2.13") -> list[int]:
    """Return the events of ``call`` with real values, without cuBLAS's workspace."""
    signs = {"alloc": 1, "free_requested": -1}
    with simulate("A100-40GB", torch_version=version, real_values=True) as gpu:
        made = call()
        before = len(gpu.trace)
        held = [made()]
        events = [
            signs[entry.action] * entry.size
            for entry in gpu.trace[before:]
            if entry.action in signs
        ]
        del held
    return [event for event in events if event != WORKSPACE]


def _exponential(factor: float) -> list[int]:
    def made() -> Callable[[], torch.Tensor]:
        matrix = torch.eye(4).mul(factor).cuda()
        return lambda: torch.linalg.matrix_exp(matrix)

    return _events(made)


NORM = [MATRIX, 16, 4, 8, -8, -16, -MATRIX]
IDENTITY = [4, MATRIX, -MATRIX, -4]


@pytest.mark.parametrize(
    ("factor", "polynomial"),
    [
        (1e-8, [2 * MATRIX, *IDENTITY, MATRIX, -2 * MATRIX]),
        (1e-5, [3 * MATRIX, *IDENTITY, MATRIX, -3 * MATRIX]),
        (
            1e-2,
            [4 * MATRIX, *IDENTITY, 12, MATRIX, -12, -MATRIX, 16, MATRIX, -16, -4 * MATRIX],
        ),
        (1.2, [MATRIX, 4 * MATRIX, *IDENTITY, 4 * MATRIX, -4 * MATRIX, -MATRIX]),
    ],
)
def test_the_norm_decides_the_degree_of_matrix_exp(factor: float, polynomial: list[int]) -> None:
    made = 4 * MATRIX if factor == 1.2 else MATRIX
    assert _exponential(factor) == [
        *NORM, MATRIX, PARTS, MATRIX, *polynomial, -made, -MATRIX, -PARTS, -4,
    ]  # fmt: skip


def test_matrix_exp_of_a_large_norm_is_squared() -> None:
    squares = _exponential(20)
    # 20 / 3.01 is 2 ** 2.73: three times, each in a new matrix.
    assert squares.count(MATRIX) - _exponential(5).count(MATRIX) == 2


def test_matrix_exp_without_values_is_refused() -> None:
    with simulate("A100-40GB") as gpu, pytest.raises(UnknownValueError):
        torch.linalg.matrix_exp(torch.randn(3, 4, 4, device="cuda"))
    assert gpu is not None


def test_matrix_exp_has_the_values_of_the_cpu() -> None:
    with simulate("A100-40GB", real_values=True):
        scaled = torch.stack([torch.eye(4) * factor for factor in (0.01, 1.0, 5.0, 20.0)])
        found = torch.linalg.matrix_exp(scaled.cuda()).cpu()
        assert torch.allclose(found, torch.linalg.matrix_exp(scaled), rtol=1e-4)
        for factor in (1e-8, 1e-5, 1e-2, 0.3, 1.2, 20):
            matrix = torch.eye(4) * factor
            assert torch.allclose(
                torch.linalg.matrix_exp(matrix.cuda()).cpu(), torch.linalg.matrix_exp(matrix)
            )


def test_matrix_rank_writes_to_out(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    matrices = torch.zeros(3, 5, 5, device="cuda")
    decomposed = [60, 12, 300, 300, 300, -300, -300, -300, 1, -1, -12]
    counted = [24, 24, -24, 15, 120, -120, -15, -24, -60, -8, -8]
    held: list[Any] = []
    for tolerances in ({}, {"atol": 0.1}, {"rtol": 0.1}, {"tol": 0.1}):
        taken = gpu.of(lambda: held.append(torch.linalg.matrix_rank(matrices, **tolerances)))  # noqa: B023
        assert taken == [24, 8, 8, *decomposed, *counted]


def test_pinv_is_a_product_of_singular_vectors(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    tall = torch.zeros(3, 5, 4, device="cuda")
    held: list[Any] = []
    assert gpu.of(lambda: held.append(torch.linalg.pinv(tall))) == [
        8, 8,
        240, 192, 48, 12, 240, 300, -300, -240, 1, -1, -12,
        24, 24, -24, 4, 48, 12, 48, -12, -48, -4, 192, 240, WORKSPACE,
        -192, -48, -24, -240, -48, -192, -8, -8,
    ]  # fmt: skip


@pytest.mark.skipif(not MAY_OVERRIDE, reason="torch 2.6 keeps its own kernels")
@pytest.mark.parametrize(
    ("shape", "products"),
    [((2, 0, 0), []), ((0, 3, 3), []), ((2, 3, 0), [36, 36, -36, -36])],
)
def test_gradients_of_an_empty_pinv_multiply_two_types(
    on: Any, shape: tuple[int, ...], products: list[int]
) -> None:
    """After autocast; bytes of the dry device with torch 2.15."""
    gpu = on("A100-40GB", "2.15")
    matrices = torch.zeros(shape, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        inverse = torch.linalg.pinv(matrices)
    ones = torch.ones_like(inverse)
    assert gpu.of(lambda: torch.autograd.grad(inverse, matrices, ones)) == products


def test_gradients_of_several_terms_are_added_out_of_place(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    factors = torch.zeros(3, 2, 3, 3, device="cuda", requires_grad=True)
    pivots = torch.ones(3, 2, 3, dtype=torch.int32, device="cuda")
    _, lower, upper = torch.lu_unpack(factors, pivots)
    summed = lower.sum() + upper.sum()
    taken = gpu.of(lambda: torch.autograd.grad(summed, factors))
    assert taken == [4, 216, 216, 216, -216, -216, -4]


_polar: Any = getattr(torch.linalg, "polar", None)


@pytest.mark.skipif(_polar is None, reason="torch 2.15 has it")
def test_polar_decomposition_symmetrizes_a_product(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    tall = torch.zeros(5, 3, device="cuda")
    held: list[Any] = []
    decomposed = [60, 36, 12, 4, 60, 100, -100, -60, 1, 1, -1, -1, -4]
    assert gpu.of(lambda: held.append(_polar(tall))) == [
        60, 36, *decomposed,
        36, 36, WORKSPACE, -36, 36, 36, -36, -36, 60, -60, -36, -60, -12, -36,
    ]  # fmt: skip
