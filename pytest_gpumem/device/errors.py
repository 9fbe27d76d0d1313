"""What can be wrong with the device that was asked for."""

from __future__ import annotations


class DeviceError(ValueError):
    """The device asked for cannot be had; the message is one sentence for the user."""
