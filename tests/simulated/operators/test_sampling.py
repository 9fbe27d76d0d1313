"""torch.normal, bernoulli, gamma and Dirichlet distributions."""

from __future__ import annotations

from typing import Any

import torch

MATRIX = 64 * 100 * 4


def test_normal_checks_its_deviations_twice(on: Any) -> None:
    gpu = on()
    x = torch.rand(64, 100, device="cuda")
    check = [4, 1, -1, -4]
    assert gpu.of(lambda: torch.normal(x, x)) == [*check, MATRIX, *check]
    assert gpu.of(lambda: torch.normal(2.7, x)) == [*check, MATRIX, *check, 4, -4]
    assert gpu.of(lambda: torch.normal(x, 1.1)) == [MATRIX, MATRIX, -MATRIX]


def test_probabilities_of_halves_are_read_as_float32(on: Any) -> None:
    gpu = on()
    x = torch.rand(64, 100, device="cuda")
    half = x.half()
    assert gpu.of(lambda: torch.bernoulli(x)) == [MATRIX]
    assert gpu.of(lambda: torch.bernoulli(half)) == [MATRIX // 2, MATRIX, -MATRIX]
    assert gpu.of(lambda: half.bernoulli_(0.5)) == []


def test_gamma_samples_and_gradients_allocate_their_results(on: Any) -> None:
    gpu = on()
    shape = torch.ones(64, 100, device="cuda", requires_grad=True)
    sample = torch._standard_gamma(shape)
    assert gpu.events()[-1:] == [MATRIX]
    weights = torch.ones_like(sample)
    # The derivative of each number, times the gradient of the sample.
    assert gpu.of(lambda: torch.autograd.grad(sample, shape, weights))[-3:] == [
        MATRIX, MATRIX, -MATRIX,
    ]  # fmt: skip


def test_dirichlet_samples_are_divided_by_their_sums(on: Any) -> None:
    gpu = on()
    shape = torch.ones(64, 100, device="cuda")
    sums = 64 * 4
    assert gpu.of(lambda: torch._sample_dirichlet(shape)) == [MATRIX, sums, -sums]


def test_samples_by_weights_with_gaps_are_of_a_copy(on: Any) -> None:
    gpu = on(version="2.15")
    weights = torch.rand(9, 8, device="cuda")
    made = gpu.of(lambda: weights.multinomial(2))
    with_gaps = gpu.of(lambda: torch.rand(9, 16, device="cuda")[:, ::2].multinomial(2))
    # Extremes are read from a copy; numbers in the layout of the weights are copied for topk.
    assert with_gaps.count(9 * 8 * 4) == made.count(9 * 8 * 4) + 1
    turned = torch.rand(8, 9, device="cuda").t()
    assert gpu.of(lambda: turned.multinomial(2)).count(9 * 8 * 4) == made.count(9 * 8 * 4) + 2
