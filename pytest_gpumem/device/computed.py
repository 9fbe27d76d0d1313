"""The amount of values that a device computes beside shapes."""

from __future__ import annotations

from enum import IntEnum


class Computed(IntEnum):
    """The values that successive runs of a test compute, each more than the one before."""

    AT_FIRST = 0
    """The device's default: small tensors on the simulated device, copies on the dry one."""
    SMALL = 1
    """Small tensors: masks, lengths, flags, counters."""
    ALL = 2
    """Tensors of any size, including random numbers."""
