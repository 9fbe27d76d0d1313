"""Expandable segments: address ranges that grow in place, page by page.

A segment reserves addresses for more than the whole device; physical pages are mapped as blocks
need them and unmapped when the cache is emptied. Follows ``find_expandable_block``, ``map_block``
and ``unmap_block`` of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from typing import Any

from pytest_gpumem.simulated.allocator.blocks import SIZE_SHIFT, Block, FreeList, Pool, new_block
from pytest_gpumem.simulated.allocator.constants import SMALL_SEGMENT

MapPages = Callable[[FreeList, int, int, Any], bool]
UnmapPages = Callable[[FreeList, int, int], None]


class ExpandableSegments:
    """All expandable segments of one device.

    Args:
        total_memory: bytes of the device; a segment reserves 9/8 of it.
        large_page: bytes that the large pool maps at a time; the small pool maps 2 MiB.
        reserve: given a size, the address of a new range.
        map_pages: asks the device for memory at an address; False if it has none left.
        unmap_pages: gives memory back.
    """

    def __init__(
        self,
        total_memory: int,
        large_page: int,
        reserve: Callable[[int], int],
        map_pages: MapPages,
        unmap_pages: UnmapPages,
    ) -> None:
        self._address_space = total_memory + total_memory // 8
        self._large_page = large_page
        self._reserve = reserve
        self._map_pages = map_pages
        self._unmap_pages = unmap_pages
        self._bases: list[int] = []

    def best_fit(self, free_list: FreeList, rounded: int) -> Block | None:
        """The cached block for a request; it stays in its list.

        A block followed by unmapped addresses counts with these: another one that fits and can grow
        less is preferred.
        """
        keys = free_list.keys
        index = bisect_left(keys, rounded << SIZE_SHIFT)
        if index == len(keys):
            return None
        block = free_list.blocks[keys[index]]
        size = _expandable_size(block)
        while (index := index + 1) < len(keys):
            following = free_list.blocks[keys[index]]
            following_size = _expandable_size(following)
            if following_size >= size:
                break
            block, size = following, following_size
        return block

    def obtain(self, free_list: FreeList, rounded: int, context: Any) -> Block | None:
        """Map pages for a block of ``rounded`` bytes; None if the device has none left."""
        block = self._find(free_list, rounded)
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

    def release(self, pool: Pool) -> None:
        """Unmap every page that lies wholly in a free block."""
        free = [
            free_list.blocks[key]
            for _, free_list in sorted(pool.free_lists.items())
            for key in free_list.keys
        ]
        for block in free:
            self._unmap(block)
            if not block.is_split and not block.is_mapped:
                del block.free_list.unmapped[block.address]
                self._bases.remove(block.address)

    def _find(self, free_list: FreeList, rounded: int) -> Block:
        """The lowest block, free or unmapped, from which on ``rounded`` bytes are not in use."""
        for _, block in sorted(free_list.unmapped.items()):
            start = block.previous if block.previous is not None and block.previous.key else block
            if _unused_from(start, rounded) >= rounded:
                return start
        return self._new_segment(free_list)

    def _new_segment(self, free_list: FreeList) -> Block:
        page = self._page(free_list)
        size = -(-self._address_space // page) * page
        block = new_block(free_list, self._reserve(size), size)
        insort(self._bases, block.address)
        free_list.unmapped[block.address] = block
        return block

    def _page(self, free_list: FreeList) -> int:
        return SMALL_SEGMENT if free_list.pool.small else self._large_page

    def _map(self, block: Block, size: int, context: Any) -> bool:
        """Map the pages that hold the first ``size`` bytes of an unmapped block.

        They merge with free neighbours into ``block``; what is left stays unmapped behind it.
        """
        free_list = block.free_list
        address = block.address
        base, page = self._base(address), self._page(free_list)
        end = base + -(-(address + size - base) // page) * page
        mapped = end - address
        if not self._map_pages(free_list, address, mapped, context):
            return False
        del free_list.unmapped[address]
        if mapped < block.size:
            rest = new_block(free_list, end, block.size - mapped)
            _insert_after(block, rest)
            free_list.unmapped[end] = rest
            block.size = mapped
        _absorb(block, block.previous, mapped=True)
        _absorb(block, block.next, mapped=True)
        free_list.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block; what is left of it stays free."""
        free_list = block.free_list
        address, end = block.address, block.address + block.size
        base, page = self._base(address), self._page(free_list)
        first = base + -(-(address - base) // page) * page
        last = base + (end - base) // page * page
        if first >= last:
            return
        free_list.remove(block)
        if first > address:
            before = new_block(free_list, address, first - address)
            _insert_before(block, before)
            free_list.add(before)
        if last < end:
            after = new_block(free_list, last, end - last)
            _insert_after(block, after)
            free_list.add(after)
        block.address, block.size = first, last - first
        _absorb(block, block.previous, mapped=False)
        _absorb(block, block.next, mapped=False)
        free_list.unmapped[block.address] = block
        self._unmap_pages(free_list, first, last - first)

    def _base(self, address: int) -> int:
        """Where the segment begins that ``address`` lies in; pages count from there."""
        return self._bases[bisect_right(self._bases, address) - 1]


def _expandable_size(block: Block) -> int:
    """What the block can grow to: its size, and that of unmapped addresses right behind it."""
    following = block.next
    grows = following is not None and not following.is_mapped
    return block.size + (following.size if following is not None and grows else 0)


def _unused_from(block: Block | None, enough: int) -> int:
    """Bytes in a row that are free or unmapped; counted until there are ``enough``."""
    found = 0
    while block is not None and found < enough and (block.key or not block.is_mapped):
        found += block.size
        block = block.next
    return found


def _insert_after(block: Block, added: Block) -> None:
    added.previous, added.next = block, block.next
    if block.next is not None:
        block.next.previous = added
    block.next = added


def _insert_before(block: Block, added: Block) -> None:
    added.previous, added.next = block.previous, block
    if block.previous is not None:
        block.previous.next = added
    block.previous = added


def _absorb(block: Block, neighbour: Block | None, *, mapped: bool) -> None:
    """Merge a neighbour that is not in use, and mapped or not as asked, into ``block``."""
    if neighbour is None:
        return
    free_list = block.free_list
    if mapped and neighbour.key:
        free_list.remove(neighbour)
    elif not mapped and not neighbour.is_mapped:
        del free_list.unmapped[neighbour.address]
    else:
        return
    block.size += neighbour.size
    if neighbour is block.previous:
        block.address = neighbour.address
        block.previous = neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block
