"""Expandable segments: address ranges that grow in place, page by page.

A segment reserves addresses for more than the whole device; physical pages are mapped as blocks
need them and unmapped when the cache is emptied. Follows ``find_expandable_block``, ``map_block``
and ``unmap_block`` of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pytest_gpumem.allocator.blocks import (
    SIZE_SHIFT,
    SMALL_SEGMENT,
    Block,
    FreeList,
    Pool,
    join,
    new_block,
    split_off,
)
from pytest_gpumem.allocator.device_memory import DeviceMemory


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

    def release(self, pool: Pool) -> None:
        """Unmap every page that lies wholly in a free block."""
        for block in pool.free_blocks():
            if not block.free_list.is_expandable:
                continue
            self._unmap(block)
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

        They merge with free neighbours into ``block``; the rest stays unmapped behind it.
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

    def _unmap(self, block: Block) -> None:
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
            block.address, block.size = first, last - first
        absorb(block, block.previous, mapped=False)
        absorb(block, block.next, mapped=False)
        free_list.unmapped[block.address] = block
        self._memory.give_back("segment_unmap", free_list, first, last - first)

    def _base_and_page(self, address: int) -> tuple[int, int]:
        """Return the base of the segment that contains ``address``, and the bytes of its pages."""
        base = max(base for base in self._pages if base <= address)
        return base, self._pages[base]


def _expandable_size(block: Block) -> int:
    """Return a block's size with that of unmapped addresses right behind it, which it can take."""
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
        block.address = neighbour.address
        join(neighbour.previous, block)
    else:
        join(block, neighbour.next)
    return neighbour.size
