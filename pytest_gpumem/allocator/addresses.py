"""Addresses of a device's segments: placed as by NVIDIA's driver for Linux, or simply upwards.

Torch breaks ties between free blocks of one size by address, so the order of addresses decides
which block is split, and with it the reserved bytes. The driver documents no rule; recorded traces
(H100 and cards before it) show this one: it takes whole ranges of 32 MiB from the top of its
addresses downwards, and the rest of a segment's last range goes to later segments that fit,
the lowest such place first. Under WSL 2 addresses increase instead.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush

from pytest_gpumem.sizes import MIB

FIRST_ADDRESS = 0x7F0000000000
"""Address of the first segment of device 0: looks like a pointer of a 64-bit Linux process."""
DEVICE_ADDRESSES = 1 << 44
"""Distance between the address ranges of two devices; freed ranges are not used again."""
RANGE = 32 * MIB
"""Bytes of addresses that the driver takes at a time."""


class DriverAddresses:
    """Addresses for the segments of one device; those of freed segments are not used again.

    Args:
        top: where the addresses end.
    """

    def __init__(self, top: int) -> None:
        self._lowest = top
        self._rests: defaultdict[int, list[int]] = defaultdict(list)
        """Heaps of addresses by the bytes that are free there."""

    def __call__(self, size: int) -> int:
        """Return the address of a new segment of ``size`` bytes."""
        fitting = [
            (rests[0], room) for room, rests in self._rests.items() if rests and room >= size
        ]
        if fitting:
            address, room = min(fitting)
            heappop(self._rests[room])
        else:
            room = -(-size // RANGE) * RANGE
            self._lowest -= room
            address = self._lowest
        if room > size:
            heappush(self._rests[room - size], address + size)
        return address


class RisingAddresses:
    """Addresses for the segments of one device, each behind the one before.

    Args:
        device: index of the device, which has a range of its own.
    """

    def __init__(self, device: int) -> None:
        self._unused = FIRST_ADDRESS + device * DEVICE_ADDRESSES

    def __call__(self, size: int) -> int:
        """Return the address of a new segment of ``size`` bytes."""
        address = self._unused
        self._unused += size
        return address
