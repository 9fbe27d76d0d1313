"""Requested size -> block size, pool and segment size."""

from __future__ import annotations

import pytest

from pytest_gpumem.allocator import Allocator
from pytest_gpumem.allocator.blocks import (
    division_slot,
    round_size,
    segment_size,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("requested", "block"),
    [
        (1, 512),
        (511, 512),
        (512, 512),
        (513, 1024),
        (1024, 1024),
        (4001, 4096),
        (1_048_576, 1_048_576),
        (1_048_577, 1_049_088),
        (257_000, 257_024),
        (17_039_360, 17_039_360),
    ],
)
def test_blocks_are_multiples_of_512(requested: int, block: int) -> None:
    assert round_size(requested) == block


@pytest.mark.parametrize(
    ("requested", "division", "block"),
    [
        (1200, 4, 1536),  # not above 512 × 4: plain rounding
        (2048, 4, 2048),
        (2049, 4, 2560),  # 2048, in steps of 512
        (1200 * 1024, 4, 1280 * 1024),  # 1 MiB, in steps of 256 KiB
        (1300 * 1024, 4, 1536 * 1024),
        (4 * MIB, 4, 4 * MIB),
        (4 * MIB + 1, 4, 5 * MIB),
        (7 * MIB + 1, 4, 8 * MIB),
        (5 * MIB, 1, 5 * MIB),  # 1 and 0 are off
        (5 * MIB, 0, 5 * MIB),
    ],
)
def test_blocks_are_rounded_up_to_divisions(requested: int, division: int, block: int) -> None:
    assert round_size(requested, (division,) * 16) == block


@pytest.mark.parametrize(
    ("size", "slot"),
    [
        (1000, 0),
        (MIB, 0),
        (2 * MIB - 1, 0),
        (2 * MIB, 1),
        (300 * MIB, 8),
        (32 << 30, 15),
        (1 << 40, 15),
    ],
)
def test_divisions_have_a_slot_for_each_power_of_two(size: int, slot: int) -> None:
    assert division_slot(size) == slot


def test_each_size_uses_its_own_slot() -> None:
    divisions = (0,) * 8 + (2,) + (0,) * 7

    assert round_size(300 * MIB, divisions) == 384 * MIB
    assert round_size(100 * MIB + 1, divisions) == 100 * MIB + 512


@pytest.mark.parametrize(
    ("rounded", "small"), [(512, True), (MIB, True), (MIB + 512, False), (1 << 34, False)]
)
def test_the_pool_follows_from_the_size(rounded: int, small: bool) -> None:
    allocator = Allocator(1 << 36)
    allocator.malloc(rounded)

    assert allocator.segments()[0]["segment_type"] == ("small" if small else "large")


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (17_039_360, 18 * MIB),
        (33_554_432, 33_554_432),
    ],
)
def test_the_segment_size_follows_from_the_block_size(rounded: int, segment: int) -> None:
    assert segment_size(rounded) == segment


def test_large_segment_size_mb_replaces_20_mib() -> None:
    assert segment_size(2 * MIB, large_segment=64 * MIB) == 64 * MIB
    assert segment_size(512, large_segment=64 * MIB) == 2 * MIB
    assert segment_size(12 * MIB, large_segment=64 * MIB) == 12 * MIB
