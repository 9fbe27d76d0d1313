"""From a requested size to a block, a pool and a segment size."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpumem.allocator.constants import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SMALL_SEGMENT,
    SMALL_SIZE,
)

DIVISION_SLOTS = 16


def round_size(size: int, divisions: Sequence[int] | None = None) -> int:
    """Return the bytes of the block that serves a request of ``size`` bytes (``round_size``).

    ``divisions`` are the 16 slots of ``roundup_power2_divisions``; None when all are off.
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    if divisions is not None:
        division = divisions[division_slot(size)]
        if division > 1 and size > MIN_BLOCK * division:
            return round_to_division(size, division)
    return (size + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


def division_slot(size: int) -> int:
    """Return the slot of ``roundup_power2_divisions``: floor(log2) of ``size`` above 1 MiB, 0 to
    15."""
    return min(max(size.bit_length() - 1 - 20, 0), DIVISION_SLOTS - 1)


def round_to_division(size: int, division: int) -> int:
    """``size`` rounded up to a ``division``-th of the power of two below it."""
    if size & (size - 1) == 0:
        return size
    power = 1 << (size.bit_length() - 1)
    step = power >> (division.bit_length() - 1)
    return (size + step - 1) // step * step


def is_small(rounded: int) -> bool:
    """Return whether the small pool serves a request of ``rounded`` bytes (``get_pool``)."""
    return rounded <= SMALL_SIZE


def segment_size(rounded: int, large_segment: int = LARGE_SEGMENT) -> int:
    """Return the bytes of a segment for ``rounded`` requested bytes (``get_allocation_size``)."""
    if rounded <= SMALL_SIZE:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE_ALLOC:
        return large_segment
    return (rounded + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE
