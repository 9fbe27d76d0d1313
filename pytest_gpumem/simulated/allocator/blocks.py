"""Blocks, and the ordered sets of free ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from pytest_gpumem.simulated.allocator.constants import SMALL_SIZE
from pytest_gpumem.simulated.allocator.statistics import PoolTally

SIZE_SHIFT = 48
"""A free block's key is ``(size << SIZE_SHIFT) + address``.

It sorts by size, then address: sizes are multiples of 512 (9 zero bits), which leaves 57 bits for
the address. One int compares several times faster than a tuple.
"""


class Block:
    """A contiguous piece of a segment, live or free."""

    __slots__ = ("address", "context", "free_list", "key", "next", "previous", "requested", "size")

    address: int
    size: int
    requested: int
    """Bytes asked for; of a free block, those of its last use, as in torch's snapshots."""
    free_list: FreeList
    """Where the block goes when it is free: the list of its pool and stream."""
    previous: Block | None
    next: Block | None
    key: int
    """Key in ``free_list`` while the block is free and mapped, else 0."""
    context: Any

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.previous is not None or self.next is not None

    @property
    def is_mapped(self) -> bool:
        """False for the addresses of an expandable segment that have no memory."""
        return self.address not in self.free_list.unmapped


def new_block(free_list: FreeList, address: int, size: int) -> Block:
    """A block without neighbours that is in no list."""
    block = Block()
    block.address = address
    block.size = size
    block.requested = block.key = 0
    block.free_list = free_list
    block.previous = block.next = block.context = None
    return block


class FreeList:
    """The free blocks of one pool and one stream, by size, then address."""

    __slots__ = ("blocks", "keys", "pool", "split_above", "stream", "tally", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.tally = pool.tally
        self.split_above = pool.split_above
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {} if pool.make_blocks is None else pool.make_blocks(pool)
        self.unmapped: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Put a free block in."""
        block.key = key = (block.size << SIZE_SHIFT) + block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]
        block.key = 0


class Pool:
    """The small or the large pool: its free lists by stream and its statistics."""

    __slots__ = (
        "clock",
        "free_lists",
        "identity",
        "make_blocks",
        "small",
        "split_above",
        "tally",
    )

    def __init__(
        self, *, small: bool, split_above: int, identity: tuple[int, int] = (0, 0)
    ) -> None:
        self.small = small
        self.identity = identity
        self.split_above = split_above
        """A block is split when what remains is larger than this many bytes."""
        self.tally = PoolTally()
        self.clock = 0
        """Counts the searches for a free block, while garbage collection is on."""
        self.make_blocks: Callable[[Pool], dict[int, Block]] | None = None
        """Makes the dict of a free list, where a plain one is not enough."""
        self.free_lists: dict[int, FreeList] = {}

    def free_list(self, stream: int) -> FreeList:
        """The free blocks of ``stream``."""
        found = self.free_lists.get(stream)
        if found is None:
            found = self.free_lists[stream] = FreeList(self, stream)
        return found

    def whole_segments(self) -> list[Block]:
        """Free blocks that are whole segments, in torch's order: stream, size, address."""
        return [
            free_list.blocks[key]
            for _, free_list in sorted(self.free_lists.items())
            for key in free_list.keys
            if not free_list.blocks[key].is_split
        ]


def split_threshold(*, small: bool, split_freely: bool) -> int:
    """Bytes that may remain of a block without it being split (``should_split``).

    The small pool, and every pool while expandable segments are on, splits off any remainder.
    """
    return 0 if small or split_freely else SMALL_SIZE
