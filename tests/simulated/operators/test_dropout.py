"""Dropout on CUDA: a mask of bytes, then the output.

Recorded: cranberrii/ftcourse 9f4902cf, the dropout of adapters before their first product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def test_the_mask_comes_before_the_output(on: Any) -> None:
    gpu = on()
    x = torch.ones(1000, 2048, device="cuda", requires_grad=True)
    assert gpu.of(lambda: F.dropout(x, 0.05)) == [2_048_000, 8_192_000]


def test_zeros_come_before_their_mask(on: Any) -> None:
    gpu = on()
    x = torch.ones(1000, device="cuda")
    assert gpu.of(lambda: torch.native_dropout(x, 1.0, True)) == [4000, 1000]
    assert gpu.of(lambda: torch.native_dropout(x, 0.5, True)) == [1000, 4000]


def test_dropout_in_evaluation_allocates_nothing(on: Any) -> None:
    gpu = on()
    x = torch.ones(1000, device="cuda")
    assert gpu.of(lambda: F.dropout(x, 0.5, training=False)) == []
