"""The memory that an allocator holds from its device, and the addresses of its segments.

Torch breaks ties between free blocks of one size by address, so the order of addresses decides
which block is split, and with it the reserved bytes. The driver documents no rule; recorded traces
(H100 and cards before it) show this one: it takes whole ranges of 32 MiB from the top of its
addresses downwards, and the rest of a segment's last range goes to later segments that fit,
the lowest such place first. Under WSL 2 addresses increase instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, Protocol

from pytest_gpumem.allocator.blocks import (
    FIRST_OF_AGE,
    MIN_BLOCK,
    UNLIMITED,
    Block,
    FreeList,
    new_block,
)
from pytest_gpumem.allocator.private_pools import Pools
from pytest_gpumem.allocator.releases import OLD_SEGMENTS_FIRST
from pytest_gpumem.allocator.statistics import Counters
from pytest_gpumem.allocator.trace import RawEntry
from pytest_gpumem.sizes import MIB


class SharedDevice(Protocol):
    """A device whose memory several processes share: this process's account with the driver."""

    def take(self, size: int) -> bool:
        """Take ``size`` bytes; return False and take nothing if the device has no room for them."""

    def give(self, size: int) -> None:
        """Give ``size`` bytes back."""

    def give_all(self) -> None:
        """Give back everything that this process has taken."""

    def others(self) -> Mapping[int, int]:
        """Return the bytes that each other process has taken, by its number."""


class DeviceMemory:
    """The segments of one device: requested, counted by ``pools``, recorded and returned.

    ``place_segment`` gives the address of a new segment by its size; ``used_elsewhere``, bytes
    outside the allocator, may be changed.
    """

    def __init__(
        self,
        total: int,
        used_elsewhere: int,
        place_segment: Callable[[int], int],
        pools: Pools,
        note: Callable[[RawEntry], None],
    ) -> None:
        self.total = total
        self.used_elsewhere = used_elsewhere
        self.every = pools.every
        self.counters = Counters()
        self.note = note
        self.limit: int | None = None
        """The most bytes that may be reserved, where a memory fraction is set."""
        self.shared: SharedDevice | None = None
        """The device that other processes share; ``None`` for a device of its own."""
        self.oversize = UNLIMITED
        """Bytes from which on a segment counts as oversize (``max_split_size_mb``)."""
        self.contexts: dict[int, Any] = {}
        """The context of the allocation that needed the segment, by address."""
        self.uncached: dict[int, int] = {}
        """Sizes by address of allocations made while caching was off."""
        self._releaser: Any = None
        self._place_segment = place_segment
        self._pools = pools
        self._unused_order = FIRST_OF_AGE

    @property
    def free(self) -> int:
        """Bytes free on the device, as in ``mem_get_info``."""
        held = self.every.reserved + sum(self.uncached.values())
        return max(0, self.total - self.used_elsewhere - held - sum(self.others.values()))

    @property
    def others(self) -> Mapping[int, int]:
        """Bytes that other processes hold of the device, by the process's number."""
        return {} if self.shared is None else self.shared.others()

    def _take(self, size: int) -> bool:
        return size <= self.free if self.shared is None else self.shared.take(size)

    def _give(self, size: int) -> None:
        if self.shared is not None:
            self.shared.give(size)

    @contextmanager
    def releasing(self, context: Any) -> Iterator[None]:
        """Attribute segments released inside to ``context``; ``None`` changes nothing."""
        self._releaser = context
        try:
            yield
        finally:
            self._releaser = None

    def allocate_uncached(self, size: int) -> int | None:
        """Return an address for ``size`` uncached bytes; None if the device has no room."""
        if not self._take(size):
            return None
        address = self._place_segment(-(-size // MIN_BLOCK) * MIN_BLOCK)
        self.uncached[address] = size
        return address

    def free_uncached(self, address: int) -> None:
        """Free the memory that :meth:`allocate_uncached` returned."""
        self._give(self.uncached.pop(address))

    def place(self, size: int) -> tuple[int, int]:
        """Return the address and shift of a new segment: since 2.13 older ones are used first.

        BlockComparatorSizeCounterAddress; before, the address decided.
        """
        address = self._place_segment(size)
        if self._pools.version < OLD_SEGMENTS_FIRST:
            return address, 0
        order, self._unused_order = self._unused_order, self._unused_order + size
        return address, order - address

    def new_segment(self, free_list: FreeList, size: int, context: Any) -> Block | None:
        """Allocate a segment from the device; return None if it has no room."""
        if not self._take(size):
            return None
        address, shift = self.place(size)
        self.add_segment(free_list, size)
        self.counters.num_device_alloc += 1
        if context is not None:
            self.contexts[address] = context
        self.note(("segment_alloc", address, size, free_list.stream, context))
        return new_block(free_list, address, size, shift)

    def add_segment(self, free_list: FreeList, size: int) -> None:
        """Count a segment."""
        self.reserve(free_list, size)
        for tally in (free_list.tally, self.every):
            tally.change("segments", 1)
        if size >= self.oversize:
            self.counters.oversize_segments.change(1)

    def release_segment(self, block: Block) -> None:
        """Return a free block that is a whole segment to the device."""
        free_list = block.free_list
        free_list.remove(block)
        self.give_back("segment_free", free_list, block.address, block.size)
        for tally in (free_list.tally, self.every):
            tally.change("segments", -1)
        if block.size >= self.oversize:
            self.counters.oversize_segments.change(-1)

    def map_pages(self, free_list: FreeList, address: int, size: int, context: Any) -> bool:
        """Take pages of an expandable segment from the device; return False if it has no room."""
        if not self._take(size):
            return False
        self.reserve(free_list, size)
        self.counters.num_device_alloc += 1
        if context is not None:
            self.contexts.setdefault(address, context)
        self.note(("segment_map", address, size, free_list.stream, context))
        return True

    def reserve(self, free_list: FreeList, size: int) -> None:
        """Count ``size`` bytes from the device, or back to it if negative."""
        for tally in (free_list.tally, self.every):
            tally.change("reserved", size)
        self._pools.count_reserved(free_list.pool, size)

    def give_back(self, action: str, free_list: FreeList, address: int, size: int) -> None:
        """Return a segment, or pages of one, to the device; ``action`` is the event of that."""
        context = self.contexts.pop(address, None)
        self.counters.num_device_free += 1
        self.note((action, address, size, free_list.stream, self._releaser or context))
        self.reserve(free_list, -size)
        self._give(size)


FIRST_ADDRESS = 0x7F0000000000
"""Address of the first segment of device 0: looks like a pointer of a 64-bit Linux process."""
DEVICE_ADDRESSES = 1 << 44
"""Distance between the address ranges of two devices; freed ranges are not used again."""
RANGE = 32 * MIB
"""Bytes of addresses that the driver takes at a time."""


class DriverAddresses:
    """Addresses below ``top`` for the segments of one device, none of them twice."""

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
    """Addresses for the segments of one device, each behind the one before, in its own range."""

    def __init__(self, device: int) -> None:
        self._unused = FIRST_ADDRESS + device * DEVICE_ADDRESSES

    def __call__(self, size: int) -> int:
        """Return the address of a new segment of ``size`` bytes."""
        address = self._unused
        self._unused += size
        return address
