"""How many values a device has beside shapes."""

from __future__ import annotations

from enum import IntEnum


class Computed(IntEnum):
    """What runs of a test compute, one after the other as it needs more."""

    AT_FIRST = 0
    """What the device has by itself: the simulated one small tensors, the dry one copies."""
    SMALL = 1
    """Small tensors: masks, lengths, flags, counters."""
    ALL = 2
    """Tensors of any size, random numbers too."""
