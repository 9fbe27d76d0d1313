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


def test_flash_attention_draws_after_its_results_in_a_capture(on: Any) -> None:
    """The events of torch 2.15.0+cu132 on the dry device: the generator's seed and offset are 8."""
    gpu = on("A100-40GB", "2.15")
    given = torch.zeros(1, 2, 64, 16, device="cuda", dtype=torch.float16)
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        events = gpu.of(lambda: attend(given, given, given, dropout_p=0.1))
    assert events[:8] == [4096, 512, 16, 8, 8, 8, 16, -16]
