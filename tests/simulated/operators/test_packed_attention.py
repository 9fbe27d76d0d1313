"""Attention over (batch, length, heads, size), and over packed sequences.

Bytes are worked out from attention.cu, attention_backward.cu and flash_api.cpp of torch; an A100
splits keys over 108 multiprocessors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem.simulated.gpu.device import parse_version

_aten = torch.ops.aten
pytestmark = pytest.mark.skipif(
    parse_version(torch.__version__) < (2, 7), reason="seeds are of the host up to 2.6"
)
BATCH, LENGTH, HEADS, SIZE = 2, 100, 4, 64
OUT = BATCH * LENGTH * HEADS * SIZE * 2
LSE = BATCH * HEADS * LENGTH * 4
RANDOM = [16, 8]
"""Seed and offset."""


def made(*shape: int, dtype: torch.dtype = torch.half) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("A100-40GB")


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_dropout_allocates_seeds_again_and_frees_the_first(gpu: Any, packed: bool) -> None:
    """Addresses of torch 2.11.0+cu130 and 2.15.0+cu132: the seeds that stay are the last."""
    q = made(BATCH * LENGTH, HEADS, SIZE) if packed else made(BATCH, LENGTH, HEADS, SIZE)
    starts = torch.tensor([0, LENGTH, BATCH * LENGTH], dtype=torch.int32).cuda() if packed else None
    results = []
    events = gpu.of(
        lambda: results.extend(
            _aten._flash_attention_forward(
                *(q, q, q, starts, starts, LENGTH, LENGTH, 0.1, True, False)
            )
        )
    )
    assert events == [OUT, LSE, *RANDOM, 16, -16]
    assert results[2].data_ptr() - results[3].data_ptr() == 512


def test_flash_attention_by_length(gpu: Any) -> None:
    q = made(BATCH, LENGTH, HEADS, SIZE)
    given = q, q, q, None, None, LENGTH, LENGTH, 0.0, True
    assert gpu.of(lambda: _aten._flash_attention_forward(*given, False)) == [OUT, LSE, *RANDOM]
    lse = made(BATCH, HEADS, LENGTH, dtype=torch.float32)
    state = torch.zeros(2, device="cuda", dtype=torch.uint64)
    call = q, q, q, q, q, lse, None, None, LENGTH, LENGTH, 0.0, True, state, state
    # Rows are rounded to 128: their sums, and gradients of queries in float32.
    rows = BATCH * 128 * HEADS
    assert gpu.of(lambda: _aten._flash_attention_backward(*call)) == [
        *(OUT, OUT, OUT, rows * 4, rows * SIZE * 4, -rows * SIZE * 4, -rows * 4)
    ]


@pytest.mark.parametrize("heads", [4, 2])
def test_flash_attention_of_packed_sequences(gpu: Any, heads: int) -> None:
    q, k = made(LENGTH, HEADS, SIZE), made(LENGTH, heads, SIZE)
    out, of_keys = OUT // BATCH, OUT // BATCH * heads // HEADS
    starts = torch.tensor([0, 30, LENGTH], device="cuda", dtype=torch.int32)
    given = q, k, k, starts, starts, 70, 70, 0.0, True
    lse = HEADS * LENGTH * 4
    events = gpu.of(lambda: _aten._flash_attention_forward(*given, False))
    assert events == [out, lse, *RANDOM]
    sums = made(HEADS, LENGTH, dtype=torch.float32)
    state = torch.zeros(2, device="cuda", dtype=torch.uint64)
    call = q, q, k, k, q, sums, starts, starts, 70, 70, 0.0, True, state, state
    # Each of the two sequences may take 128 rows more; a repeated head has gradients of its own.
    rows = (LENGTH + 2 * 128) * HEADS
    expanded = [out, out] if heads < HEADS else []
    assert gpu.of(lambda: _aten._flash_attention_backward(*call)) == [
        *(out, of_keys, of_keys, rows * 4, rows * SIZE * 4, *expanded),
        *(*(-each for each in expanded), -rows * SIZE * 4, -rows * 4),
    ]


def test_efficient_attention_by_length(gpu: Any) -> None:
    q = made(BATCH, LENGTH, HEADS, SIZE)
    given = q, q, q, None, None, None, -1, -1, 0.0, 1
    # Rows of logsumexp are rounded to 32.
    kept = BATCH * HEADS * 128 * 4
    # Since 2.15 the random state is on the device where there is no dropout.
    state = [8, 8] if torch.__version__ >= "2.14" else []
    forward = _aten._efficient_attention_forward
    assert gpu.of(lambda: forward(*given, True)) == [*state, OUT, kept]
    assert [each for each in gpu.of(lambda: forward(*given, False)) if each > 0] == [*state, OUT]
    lse, nothing = made(BATCH, HEADS, 128, dtype=torch.float32), torch.Tensor()
    call = q, q, q, q, None, q, None, None, -1, -1, lse, 0.0, nothing, nothing, 1, False
    # 8 pairs, 2 blocks of 64 queries by 1 of keys: 16 bytes and 64 x 64 float32.
    workspace = 8 * 2 * (16 + 64 * 64 * 4)
    assert gpu.of(lambda: _aten._efficient_attention_backward(*call)) == [
        *(OUT, OUT, OUT, LSE, workspace, -LSE, -workspace)
    ]


def test_the_gradient_of_a_bias_has_aligned_rows(gpu: Any) -> None:
    q = made(BATCH, LENGTH, HEADS, SIZE)
    bias = made(BATCH, HEADS, LENGTH, 112)[..., :LENGTH]
    lse, nothing = made(BATCH, HEADS, 128, dtype=torch.float32), torch.Tensor()
    call = q, q, q, q, bias, q, None, None, -1, -1, lse, 0.0, nothing, nothing, 0, True
    events = gpu.of(lambda: _aten._efficient_attention_backward(*call))
    assert events[:4] == [OUT, OUT, OUT, BATCH * HEADS * LENGTH * 112 * 2]
