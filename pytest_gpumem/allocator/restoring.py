"""Segments and blocks of a snapshot, made again in an empty allocator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pytest_gpumem.allocator.blocks import SHARED_POOL, Block, FreeList, new_block
from pytest_gpumem.allocator.device_memory import DeviceMemory
from pytest_gpumem.allocator.expandable import ExpandableSegments
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.private_pools import Pools


def restore(
    segments: Iterable[Mapping[str, Any]],
    pools: Pools,
    memory: DeviceMemory,
    expandable: ExpandableSegments | None,
    live: dict[int, Block],
) -> None:
    """Make segments and their blocks; those in use go to ``live``.

    Mapped ranges of one expandable segment share pool and stream. Its addresses begin at
    ``reserved_from`` of the first range, or at that range.

    Raises:
        AllocatorError: there are expandable segments, and no settings have turned them on.
    """
    mapped: dict[FreeList, list[Block]] = {}
    bases: dict[FreeList, int] = {}
    for segment in segments:
        first, second = segment.get("segment_pool_id", SHARED_POOL)
        pool = pools.named((first, second), small=segment["segment_type"] == "small")
        plain = pool.free_list(segment["stream"])
        if not segment.get("is_expandable"):
            memory.add_segment(new_block(plain, segment["address"], segment["total_size"], 0))
            _linked(_blocks(segment, plain, live))
            continue
        free_list = plain.expandable_side()
        memory.add_pages(free_list, segment["total_size"])
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


def _linked(blocks: Sequence[Block]) -> None:
    for previous, following in pairwise(blocks):
        previous.next, following.previous = following, previous


def _count_live(block: Block) -> None:
    free_list = block.free_list
    for tally in (free_list.tally, free_list.every):
        tally.change("blocks", 1)
        tally.change("bytes", block.size)
        tally.change("requested", block.requested)
