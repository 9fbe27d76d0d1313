"""Checkpoints of private pools: how their segments are divided, to be restored later.

Source: getCheckpointState, setCheckpointPoolState and setSegmentStateToCheckpoint of
c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from pytest_gpumem.allocator.blocks import (
    SHARED_POOL,
    Block,
    FreeList,
    PoolId,
    join,
    new_block,
    split_off,
)
from pytest_gpumem.allocator.device_memory import DeviceMemory
from pytest_gpumem.allocator.expandable import ExpandableSegments
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.private_pools import Pools
from pytest_gpumem.allocator.trace import RawEntry


class BlockState(NamedTuple):
    """The saved state of one block; sizes are bytes."""

    address: int
    size: int
    is_live: bool


class PoolState(NamedTuple):
    """The saved state of a private pool."""

    pool: PoolId
    segments: tuple[tuple[BlockState, ...], ...]


def state_of(pool: PoolId, blocks: Iterable[Block]) -> PoolState:
    """Return the state of ``pool``, whose blocks are among ``blocks``."""
    segments: dict[Block, list[BlockState]] = {}
    heads = [b for b in blocks if b.previous is None and b.free_list.pool.identity == pool]
    for head in sorted(heads, key=lambda block: block.address):
        block: Block | None = head
        while block is not None:
            if block.is_mapped:
                state = BlockState(block.address, block.size, not block.key)
                segments.setdefault(head, []).append(state)
            block = block.next
    return PoolState(pool, tuple(map(tuple, segments.values())))


def divide(
    segment: tuple[BlockState, ...], free: dict[int, Block], note: Callable[[RawEntry], None]
) -> list[Block]:
    """Allocate every block of ``segment``, which is whole and free, as it was divided.

    ``free`` has the free blocks of the pool by address. Raises ``AllocatorError`` where the segment
    does not exist any more.
    """
    made = []
    for at, state in enumerate(segment):
        block = free.pop(state.address, None)
        if block is None or block.size < state.size:
            raise AllocatorError(
                f"The memory pool has no free segment at {state.address:#x} any more, as it had"
                " when the checkpoint was taken."
            )
        was_split, is_last = block.is_split, at + 1 == len(segment)
        free_list = block.free_list
        free_list.remove(block)
        if not is_last:
            rest = free[block.address + state.size] = split_off(block, state.size)
            free_list.add(rest)
            if not was_split:
                free_list.note_split(rest.size)
        if was_split:
            for tally in free_list.split_tallies:
                tally.change("split_bytes", -block.size)
                tally.change("splits", -int(is_last))
        block.requested = block.size
        _count_live(block)
        note(("alloc", block.address, block.size, free_list.stream, None))
        made.append(block)
    return made


def restore(
    segments: Iterable[Mapping[str, Any]],
    pools: Pools,
    memory: DeviceMemory,
    expandable: ExpandableSegments | None,
    live: dict[int, Block],
) -> None:
    """Make segments and their blocks; those in use go to ``live``.

    Mapped ranges of one expandable segment share pool and stream. Its addresses begin at
    ``reserved_from`` of the first range, or at that range. Raises ``AllocatorError`` where no
    settings have turned them on.
    """
    mapped: dict[FreeList, list[Block]] = {}
    bases: dict[FreeList, int] = {}
    for segment in segments:
        first, second = segment.get("segment_pool_id", SHARED_POOL)
        pool = pools.named((first, second), small=segment["segment_type"] == "small")
        plain = pool.free_list(segment["stream"])
        if not segment.get("is_expandable"):
            memory.add_segment(plain, segment["total_size"])
            for before, after in pairwise(_blocks(segment, plain, live)):
                join(before, after)
            continue
        free_list = plain.expandable_side()
        memory.reserve(free_list, segment["total_size"])
        mapped.setdefault(free_list, []).extend(_blocks(segment, free_list, live))
        base = segment.get("reserved_from", segment["address"])
        bases[free_list] = min(base, bases.get(free_list, base))
    for free_list, blocks in mapped.items():
        if expandable is None:
            raise AllocatorError(
                "There are expandable segments, and the settings do not turn them on."
            )
        blocks.sort(key=lambda block: block.address)
        expandable.restore(free_list, bases[free_list], blocks)


def _blocks(segment: Mapping[str, Any], free_list: FreeList, live: dict[int, Block]) -> list[Block]:
    """Return the blocks of a segment, without neighbours."""
    blocks = []
    address = segment["address"]
    for each in segment["blocks"]:
        block = new_block(free_list, address, each["size"], 0)
        block.requested = each.get("requested_size", 0)
        blocks.append(block)
        address += block.size
        if each["state"] == "inactive":
            free_list.add(block)
            if block.size < segment["total_size"]:
                free_list.note_split(block.size)
        else:
            live[block.address] = block
            _count_live(block)
    return blocks


def _count_live(block: Block) -> None:
    free_list = block.free_list
    for tally in (free_list.tally, free_list.every):
        tally.change("blocks", 1)
        tally.change("bytes", block.size)
        tally.change("requested", block.requested)
