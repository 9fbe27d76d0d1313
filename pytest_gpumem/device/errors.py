"""The error of a requested device."""

from __future__ import annotations


class DeviceError(ValueError):
    """A requested device that is not available; the message is one sentence for the user."""
