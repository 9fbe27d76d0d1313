"""Random numbers around means, and with probabilities."""

from __future__ import annotations

from typing import Any

import torch

MATRIX = 64 * 100 * 4


def test_deviations_are_checked_before_and_after(on: Any) -> None:
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
