"""Blocks, the ordered sets of free ones, and the rounding of requests.

Constants are those of c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp, in bytes;
the same in torch 2.6 to 2.15.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_gpumem.allocator.statistics import Tally

MIN_BLOCK: Final = 512
"""kMinBlockSize: every block is a multiple of this."""
SMALL_SIZE: Final = 1 << 20
"""kSmallSize: the largest rounded request that the small pool serves."""
SMALL_SEGMENT: Final = 2 << 20
"""kSmallBuffer: size of a small-pool segment."""
LARGE_SEGMENT: Final = 20 << 20
"""kLargeBuffer: segment for requests below MIN_LARGE_ALLOC; `large_segment_size_mb` since 2.11."""
MIN_LARGE_ALLOC: Final = 10 << 20
"""kMinLargeAlloc: from this rounded size on, a request gets a segment of its own size."""
ROUND_LARGE: Final = 2 << 20
"""kRoundLarge: such a segment is a multiple of this."""
UNLIMITED: Final = 1 << 62
"""The value of an unset limit: size_t's maximum."""
TOO_LARGE: Final = 1 << 60
"""kExabyte: a request this large is refused before anything is tried."""

PoolId = tuple[int, int]
"""torch's MempoolId_t; (0, 0) is the shared pool."""

SHARED_POOL: PoolId = (0, 0)

SIZE_SHIFT = 48
"""A free block's key is ``(size << SIZE_SHIFT) + address + shift``.

It sorts by size, then by ``address + shift``: sizes are multiples of 512 (9 zero bits), which
leaves 57 bits for these. One int compares several times faster than a tuple.
"""

FIRST_OF_AGE = 1 << 50
"""Lower bound of ``address + shift`` for segments sorted by age: above every address."""


@dataclass(init=False, eq=False, slots=True)
class Block:
    """A contiguous piece of a segment, live or free."""

    address: int
    size: int
    requested: int
    """Requested bytes; of a free block, those of its last use, as in torch's snapshots."""
    free_list: FreeList
    """The list of its pool and stream that the block joins when it is free."""
    previous: Block | None
    next: Block | None
    shift: int
    """Number added to addresses of its segment where free blocks of one size are compared.

    0 up to torch 2.11, which uses the lowest address. Since 2.13 it orders segments by their age.
    In 2.12 each block has its own shift, and the sum is the number of the block.
    """
    key: int
    """Key in ``free_list`` while the block is free and mapped, else 0."""
    born: int
    """The clock of its pool when it became free, from which its age follows (``gc_count``)."""
    context: Any

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.previous is not None or self.next is not None

    @property
    def is_mapped(self) -> bool:
        """False for the addresses of an expandable segment that have no memory."""
        return self.address not in self.free_list.unmapped


def new_block(free_list: FreeList, address: int, size: int, shift: int) -> Block:
    """Return a block without neighbours that is in no list."""
    block = Block()
    block.address = address
    block.size = size
    numbers = free_list.pool.numbers
    block.shift = shift if numbers is None else next(numbers) - address
    block.requested = block.key = 0
    block.free_list = free_list
    block.previous = block.next = block.context = None
    return block


def move(block: Block, address: int) -> None:
    """Make ``block`` begin at ``address``."""
    if block.free_list.pool.numbers is not None:
        block.shift += block.address - address
    block.address = address


def join(before: Block | None, after: Block | None) -> None:
    """Make two blocks neighbours; ``None`` stands for the end of a segment."""
    if before is not None:
        before.next = after
    if after is not None:
        after.previous = before


def split_off(block: Block, size: int) -> Block:
    """Cut ``block`` down to ``size`` bytes; return the rest as a block that is in no list."""
    rest = new_block(block.free_list, block.address + size, block.size - size, block.shift)
    join(rest, block.next)
    join(block, rest)
    block.size = size
    return rest


class PoolStream(int):
    """A stream's handle in a trace, where the memory is that of a private pool."""

    pool_id: PoolId

    def __new__(cls, stream: int, pool_id: PoolId) -> PoolStream:
        """Return the handle ``stream``, with the pool."""
        handle = super().__new__(cls, stream)
        handle.pool_id = pool_id
        return handle


class FreeList:
    """The free blocks of one pool and one stream, by size, then address."""

    def __init__(self, pool: Pool, stream: int, plain: FreeList | None = None) -> None:
        self.pool = pool
        self.stream = stream if pool.identity == SHARED_POOL else PoolStream(stream, pool.identity)
        self.is_expandable = plain is not None
        """Whether its blocks are parts of expandable segments."""
        self.expandable: FreeList | None = None
        self.unmapped: dict[int, Block] = {}
        self.tally = pool.tally
        self.every = pool.every
        self.split_tallies = pool.tally, pool.every
        if plain is None:
            self.keys: list[int] = []
            self.blocks: dict[int, Block] = {}
        else:
            # torch leaves them out of ``inactive_split``, because their pages can be given back.
            self.split_tallies = Tally(), Tally()
            self.keys = plain.keys
            self.blocks = plain.blocks

    def expandable_side(self) -> FreeList:
        """Return the list for blocks of expandable segments: the same blocks, counted otherwise."""
        if self.expandable is None:
            self.expandable = FreeList(self.pool, int(self.stream), self)
        return self.expandable

    def add(self, block: Block) -> None:
        """Insert a free block."""
        block.key = (block.size << SIZE_SHIFT) + block.address + block.shift
        insort(self.keys, block.key)
        self.blocks[block.key] = block
        block.born = self.pool.clock

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]
        block.key = 0

    def note_split(self, size: int) -> None:
        """Count the split of a whole segment: its free ``size`` bytes become inactive split."""
        for tally in self.split_tallies:
            tally.splits += 1
            tally.splits_peak = max(tally.splits_peak, tally.splits)
            tally.split_bytes += size
            tally.split_bytes_peak = max(tally.split_bytes_peak, tally.split_bytes)


class Pool:
    """A small or a large pool: its free lists by stream and its statistics."""

    def __init__(
        self,
        *,
        small: bool,
        tally: Tally,
        every: Tally,
        identity: PoolId,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.numbers = numbers
        """The numbers of new blocks in torch 2.12, which orders free blocks by them."""
        self.small = small
        self.identity = identity
        self.split_above = 0
        """Bytes of a remainder above which a block is split."""
        self.tally = tally
        self.every = every
        self.clock = 0
        """Number of searches for a free block, while garbage collection is on."""
        self.free_lists: dict[int, FreeList] = {}

    def free_list(self, stream: int) -> FreeList:
        """Return the free blocks of ``stream``."""
        found = self.free_lists.get(stream)
        if found is None:
            found = self.free_lists[stream] = FreeList(self, stream)
        return found

    def free_blocks(self) -> list[Block]:
        """Return every free block that has memory, in torch's order: stream, size, address."""
        return [
            free_list.blocks[key]
            for _, free_list in sorted(self.free_lists.items())
            for key in free_list.keys
        ]


DIVISION_SLOTS = 16


def round_size(size: int, divisions: Sequence[int] | None = None) -> int:
    """Return the bytes of the block that serves a request of ``size`` bytes (``round_size``).

    ``divisions`` are the 16 slots of ``roundup_power2_divisions``; None when all are off.
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    if divisions is not None:
        division = divisions[division_slot(size)]
        if division > 1 and size > MIN_BLOCK * division:
            # Up to a division-th of the power of two below it.
            step = (1 << (size.bit_length() - 1)) // division
            return -(-size // step) * step
    return (size + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


def division_slot(size: int) -> int:
    """Return the slot of ``roundup_power2_divisions``: floor(log2) of MiB in ``size``, 0 to 15."""
    return min(max(size.bit_length() - 1 - 20, 0), DIVISION_SLOTS - 1)


def segment_size(rounded: int, large_segment: int = LARGE_SEGMENT) -> int:
    """Return the bytes of a segment for ``rounded`` requested bytes (``get_allocation_size``)."""
    if rounded <= SMALL_SIZE:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE_ALLOC:
        return large_segment
    return (rounded + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE
