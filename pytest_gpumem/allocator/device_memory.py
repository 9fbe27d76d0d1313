"""The memory that an allocator holds from its device, and the addresses of its segments.

Torch breaks ties between free blocks of one size by address, so the order of addresses decides
which block is split, and with it the reserved bytes. The driver documents no rule; recorded traces
(H100 and cards before it) show this one: it takes whole ranges of 32 MiB from the top of its
addresses downwards, and the rest of a segment's last range goes to later segments that fit,
the lowest such place first. Under WSL 2 addresses increase instead.

Expandable segments are address ranges that grow in place, page by page. Such a segment reserves
addresses for more than the whole device; physical pages are mapped as blocks need them and unmapped
when the cache is emptied. Follows ``find_expandable_block``, ``map_block`` and ``unmap_block`` of
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, Protocol

from pytest_gpumem.allocator.blocks import (
    FIRST_OF_AGE,
    SIZE_SHIFT,
    SMALL_SEGMENT,
    UNLIMITED,
    Block,
    FreeList,
    Pool,
    join,
    move,
    new_block,
    split_off,
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
    """The segments of one device, which it allocates, counts in ``pools``, records and returns.

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
        self._place_segment = place_segment
        self._pools = pools
        self._unused_order = FIRST_OF_AGE

    @property
    def free(self) -> int:
        """Bytes free on the device, as in ``mem_get_info``."""
        held = self.used_elsewhere + self.every.reserved + sum(self.others.values())
        return max(0, self.total - held)

    @property
    def others(self) -> Mapping[int, int]:
        """Bytes of the device that other processes use, by PID."""
        return {} if self.shared is None else self.shared.others()

    def _take(self, size: int) -> bool:
        return size <= self.free if self.shared is None else self.shared.take(size)

    def place(self, size: int) -> tuple[int, int]:
        """Return the address and shift of a new segment.

        The oldest come first since 2.13 (BlockComparatorSizeCounterAddress), up to 2.11 the lowest.
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

    def release_segment(self, block: Block, context: Any) -> None:
        """Return a free block that is a whole segment to the device, for ``context``."""
        free_list = block.free_list
        free_list.remove(block)
        self.give_back("segment_free", free_list, block.address, block.size, context)
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

    def give_back(
        self, action: str, free_list: FreeList, address: int, size: int, context: Any
    ) -> None:
        """Return a segment, or pages of one, to the device, with ``action`` as the event.

        ``context`` is that of the event; where there is none, the one that needed the segment.
        """
        known = self.contexts.pop(address, None)
        self.counters.num_device_free += 1
        self.note((action, address, size, free_list.stream, context or known))
        self.reserve(free_list, -size)
        if self.shared is not None:
            self.shared.give(size)


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
    """Addresses for the segments of one device, each after the one before, in its own range."""

    def __init__(self, device: int) -> None:
        self._unused = FIRST_ADDRESS + device * DEVICE_ADDRESSES

    def __call__(self, size: int) -> int:
        """Return the address of a new segment of ``size`` bytes."""
        address = self._unused
        self._unused += size
        return address


class ExpandableSegments:
    """All expandable segments of one device."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.address_space = 0
        """Bytes of addresses that a new segment reserves."""
        self.large_page = 0
        """Bytes that the large pool maps at a time in new segments. The small pool maps 2 MiB."""
        self._memory = memory
        self._pages: dict[int, int] = {}
        """Bytes of a page, by the first address of the segment."""

    def best_fit(self, free_list: FreeList, rounded: int) -> Block | None:
        """Return the cached block for a request; it stays in its list.

        A block followed by unmapped addresses counts with these: another one that fits and can grow
        less is preferred.
        """
        keys = free_list.keys
        index = bisect_left(keys, rounded << SIZE_SHIFT)
        if index == len(keys):
            return None
        block = free_list.blocks[keys[index]]
        size = _expandable_size(block)
        while block.free_list.is_expandable and (index := index + 1) < len(keys):
            following = free_list.blocks[keys[index]]
            following_size = _expandable_size(following)
            if following_size >= size:
                break
            block, size = following, following_size
        return block

    def obtain(self, free_list: FreeList, rounded: int, context: Any) -> Block | None:
        """Map pages for a block of ``rounded`` bytes.

        None if the device has none left, or no segment has the addresses.
        """
        free_list = free_list.expandable_side()
        block = self._find(free_list, rounded)
        if block is None:
            return None
        if not block.is_mapped and not self._map(block, min(block.size, rounded), context):
            return None
        while block.size < rounded:
            following = block.next
            assert following is not None
            if not self._map(following, min(rounded - block.size, following.size), context):
                return None
            block = following
        free_list.remove(block)
        return block

    def restore(self, free_list: FreeList, base: int, mapped: Sequence[Block]) -> None:
        """Make a segment whose addresses begin at ``base``, with these blocks of mapped memory.

        Addresses between and after them are unmapped.
        """
        ends = [base, *(block.address + block.size for block in mapped)]
        self._pages[base], size = self._page_and_size(free_list)
        end = max(base + size, ends[-1])
        starts = [*(block.address for block in mapped), end]
        gaps = [
            new_block(free_list, first, last - first, 0)
            for first, last in zip(ends, starts, strict=True)
            if last > first
        ]
        free_list.unmapped.update((gap.address, gap) for gap in gaps)
        for before, after in pairwise(sorted((*mapped, *gaps), key=lambda block: block.address)):
            join(before, after)

    def release(self, pool: Pool, context: Any) -> None:
        """Unmap every page that is wholly in a free block, for ``context``."""
        for block in pool.free_blocks():
            if not block.free_list.is_expandable:
                continue
            self._unmap(block, context)
            if not block.is_split and not block.is_mapped:
                del block.free_list.unmapped[block.address], self._pages[block.address]

    def _find(self, free_list: FreeList, rounded: int) -> Block | None:
        """Return the lowest block, free or unmapped, that begins ``rounded`` bytes not in use.

        A new segment's if there is none.
        """
        for _, block in sorted(free_list.unmapped.items()):
            start = block.previous if block.previous is not None and block.previous.key else block
            unused = 0
            following: Block | None = start
            while following is not None and (following.key or not following.is_mapped):
                unused, following = unused + following.size, following.next
                if unused >= rounded:
                    return start
        page, size = self._page_and_size(free_list)
        if size < rounded:
            return None
        address, shift = self._memory.place(size)
        block = free_list.unmapped[address] = new_block(free_list, address, size, shift)
        self._pages[address] = page
        return block

    def _page_and_size(self, free_list: FreeList) -> tuple[int, int]:
        """Return the bytes of a page and of the addresses of a new segment."""
        page = SMALL_SEGMENT if free_list.pool.small else self.large_page
        return page, -(-self.address_space // page) * page

    def _map(self, block: Block, size: int, context: Any) -> bool:
        """Map the pages that hold the first ``size`` bytes of an unmapped block.

        They merge with free neighbours into ``block``; the rest stays unmapped after it.
        """
        free_list = block.free_list
        address = block.address
        base, page = self._base_and_page(address)
        end = base + -(-(address + size - base) // page) * page
        mapped = end - address
        if not self._memory.map_pages(free_list, address, mapped, context):
            return False
        del free_list.unmapped[address]
        if mapped < block.size:
            free_list.unmapped[end] = split_off(block, mapped)
        absorb(block, block.previous, mapped=True)
        absorb(block, block.next, mapped=True)
        free_list.add(block)
        return True

    def _unmap(self, block: Block, context: Any) -> None:
        """Unmap the whole pages of a free block; the rest of it stays free."""
        free_list = block.free_list
        address, end = block.address, block.address + block.size
        base, page = self._base_and_page(address)
        first = base + -(-(address - base) // page) * page
        last = base + (end - base) // page * page
        if first >= last:
            return
        free_list.remove(block)
        if last < end:
            free_list.add(split_off(block, last - address))
        if first > address:
            before = new_block(free_list, address, first - address, block.shift)
            join(block.previous, before)
            join(before, block)
            free_list.add(before)
            move(block, first)
            block.size = last - first
        absorb(block, block.previous, mapped=False)
        absorb(block, block.next, mapped=False)
        free_list.unmapped[block.address] = block
        self._memory.give_back("segment_unmap", free_list, first, last - first, context)

    def _base_and_page(self, address: int) -> tuple[int, int]:
        """Return the base of the segment that contains ``address``, and the bytes of its pages."""
        base = max(base for base in self._pages if base <= address)
        return base, self._pages[base]


def _expandable_size(block: Block) -> int:
    """Return a block's size, with that of unmapped addresses after it, into which it can grow."""
    following = block.next
    grows = following is not None and not following.is_mapped
    return block.size + (following.size if following is not None and grows else 0)


def absorb(block: Block, neighbour: Block | None, *, mapped: bool) -> int:
    """Merge a neighbour that is not in use, mapped or unmapped as given, into ``block``.

    Returns the bytes that ``block`` gained.
    """
    if neighbour is None:
        return 0
    free_list = block.free_list
    if mapped and neighbour.key:
        free_list.remove(neighbour)
    elif not mapped and not neighbour.is_mapped:
        del free_list.unmapped[neighbour.address]
    else:
        return 0
    block.size += neighbour.size
    if neighbour is block.previous:
        move(block, neighbour.address)
        join(neighbour.previous, block)
    else:
        join(block, neighbour.next)
    return neighbour.size
