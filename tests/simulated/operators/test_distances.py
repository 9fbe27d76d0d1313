"""Gradients of cdist and pdist, and renorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def test_each_pair_of_rows_writes_a_partial_gradient(on: Any) -> None:
    gpu = on()
    x = torch.randn(5, 5, device="cuda", requires_grad=True)
    distances = torch.pdist(x, 1.0)
    gradient = torch.ones_like(distances)
    # 4 · 5 · 5 floats, added up.
    assert gpu.of(lambda: torch.autograd.grad(distances, x, gradient)) == [100, 400, -400]


def test_distances_of_rows_with_gaps_are_those_of_copies(on: Any) -> None:
    gpu = on()
    x = torch.randn(2, 5, 6, device="cuda")[..., ::2].requires_grad_()
    y = torch.randn(7, 3, device="cuda", requires_grad=True)
    made: list[torch.Tensor] = []
    # Columns left out, 2 x 5 x 3 floats; the other side, for each of the two: 2 x 7 x 3.
    forward = gpu.of(lambda: made.append(torch.cdist(x, y, 1.0)))
    assert forward == [120, 168, 280, -168, -120]
    gradient = torch.ones_like(made[0])
    backward = gpu.of(lambda: torch.autograd.grad(made[0], x, gradient))
    assert backward == [120, 168, 120, 840, -840, -168, -120]


def test_norms_of_halves_are_float32_and_their_factors_halves(on: Any) -> None:
    gpu = on()
    x = torch.randn(64, 100, device="cuda")
    half = x.bfloat16()
    assert gpu.of(lambda: torch.renorm(x, 2, 0, 1.0)) == [25_600, 256, -256]
    assert gpu.of(lambda: torch.renorm(half, 2, 0, 1.0)) == [12_800, 256, 128, -128, -256]


@pytest.mark.parametrize(("version", "parts"), [("2.14", []), ("2.15", [400, -400])])
def test_the_norm_0_has_parts_since_2_15(on: Any, version: str, parts: list[int]) -> None:
    gpu = on("A100-40GB", version)
    x = torch.randn(5, 5, device="cuda", requires_grad=True)
    distances = torch.pdist(x, 0.0)
    gradient = torch.ones_like(distances)
    assert gpu.of(lambda: torch.autograd.grad(distances, x, gradient)) == [100, *parts]


@pytest.mark.filterwarnings("ignore:Casting complex values")  # of the order 0 on meta
def test_norms_of_single_complex_numbers_are_absolute_values(on: Any) -> None:
    gpu = on()
    x = torch.zeros(100, 1, dtype=torch.complex64, device="cuda")
    # Real parts of complex results; how many differ from zero is counted.
    assert gpu.of(lambda: torch.linalg.vector_norm(x, 3, dim=1)) == [400, 800, -800]
    assert gpu.of(lambda: torch.linalg.vector_norm(x, 0, dim=1)) == [400]
    assert gpu.of(lambda: torch.linalg.vector_norm(x, 3, dim=0)) == [4]
    assert gpu.of(x[0].norm) == [4, 8, -8]
    assert gpu.of(x.real[0].norm) == [4]
    number = x[0, 0]
    assert gpu.of(lambda: torch.linalg.vector_norm(number)) == [4, 8, -8]
    assert gpu.of(lambda: torch.linalg.vector_norm(number, dim=0)) == [4]
