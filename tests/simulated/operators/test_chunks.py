"""``split_with_sizes_copy`` and ``_chunk_cat`` allocate the packed arguments of their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

MIB = 1 << 20


@pytest.mark.parametrize(
    ("chunks", "packed"),
    [
        # Two parts of 2 MiB in blocks of 2 KiB: an address in either, a size, 1,024 blocks each,
        # and three sums of blocks are 2,057 numbers, 16,456 B.
        (2, 16_456),
        # 8 · 2,048 blocks are more than twice the 108 · 16 that run at once, so that a block copies
        # two of 2 KiB: 1,033 numbers, 8,264 B.
        (8, 8_264),
    ],
)
def test_targets_of_split_with_sizes_copy_are_packed(on: Any, chunks: int, packed: int) -> None:
    gpu = on()
    gathered = torch.empty(chunks, MIB, device="cuda")
    parts = [torch.empty(chunks, MIB // 2, device="cuda") for _ in range(2)]
    sizes = [MIB // 2, MIB // 2]
    assert gpu.of(lambda: torch.split_with_sizes_copy(gathered, sizes, 1, out=parts)) == [
        *(packed, -packed)
    ]
    # Parts that are not dense are copied one by one.
    strided = [torch.empty(chunks, MIB, device="cuda")[:, ::2] for _ in range(2)]
    assert gpu.of(lambda: torch.split_with_sizes_copy(gathered, sizes, 1, out=strided)) == []


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [
        # Of each tensor 128 rows, 512 KiB or 256 blocks: 2 · 6 + 2 + 512 numbers, 4,208 B.
        (torch.float32, [4_208, -4_208]),
        (torch.bfloat16, [4_208, -4_208]),
        # No kernel widens these.
        (torch.float16, []),
    ],
)
def test_sources_of_chunk_cat_are_packed(on: Any, dtype: torch.dtype, packed: list[int]) -> None:
    gpu = on()
    gradients = [torch.empty(1024, 1024, dtype=dtype, device="cuda") for _ in range(2)]
    out = torch.empty(8, 2 * 128 * 1024, device="cuda")
    assert gpu.of(lambda: torch._chunk_cat(gradients, 0, 8, out=out))[:2] == packed


def test_packed_arguments_are_allocated_after_the_result(on: Any) -> None:
    gpu = on()
    gradients = [torch.empty(1024, 1024, device="cuda") for _ in range(2)]
    assert gpu.of(lambda: torch._chunk_cat(gradients, 0, 8)) == [8 * MIB, 4_208, -4_208]


def test_steps_of_padded_sequences_are_copied_and_joined(on: Any) -> None:
    """Events of torch 2.15.0+cu132: three sequences have 2 steps, two have 3, one has 5."""
    gpu = on()
    lengths, pack = torch.tensor([5, 3, 2]), torch.nn.utils.rnn.pack_padded_sequence
    padded = torch.randn(3, 5, 32, device="cuda")
    by_time = padded.transpose(0, 1).contiguous()
    first, second, joined = 6 * 128, 2 * 128, 10 * 128
    assert gpu.of(lambda: pack(padded, lengths, batch_first=True).data) == [
        *(first, second, joined, -first, -second)
    ]
    # The first two steps of all sequences lie beside each other already.
    assert gpu.of(lambda: pack(by_time, lengths).data) == [second, joined, -second]


def test_halves_that_are_added_up_in_float32_are_padded_one_by_one(on: Any) -> None:
    """As torch 2.15 on the dry device."""
    gpu = on()
    gradients = [
        torch.empty(50, 48, dtype=torch.half, device="cuda"),
        torch.empty(50, dtype=torch.half, device="cuda"),
        torch.empty(4, dtype=torch.half, device="cuda"),
    ]
    out = torch.empty(4, 13 * 48 + 13 + 1, device="cuda")
    events = gpu.of(lambda: torch._chunk_cat(gradients, 0, 4, out=out))
    assert events == [4992, 104, -4992, -104]
