"""Devices that tests are measured on, and the environment that keys their numbers."""

from __future__ import annotations

from enum import IntEnum


class DeviceError(ValueError):
    """A requested device that is not available; the message is one sentence for the user."""


class ValueLevel(IntEnum):
    """The tensor values that a run of a test computes; each rerun computes more."""

    AT_FIRST = 0
    """The device's default: small tensors on the simulated device, copies on the dry one."""
    SMALL = 1
    """Small tensors: masks, lengths, flags, counters."""
    ALL = 2
    """Tensors of any size, including random numbers."""
