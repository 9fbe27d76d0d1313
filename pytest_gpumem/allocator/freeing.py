"""A free in two steps: the program requests it, and it completes once no stream uses the block.

Between the two the block is pending: no longer allocated, and still active.
"""

from __future__ import annotations

from typing import Any

from pytest_gpumem.allocator.blocks import Block
from pytest_gpumem.allocator.device_memory import DeviceMemory
from pytest_gpumem.allocator.expandable import absorb


def request_free(block: Block, memory: DeviceMemory, context: Any = None) -> None:
    """Mark a block as freed by the program: it is no longer allocated, but active."""
    free_list = block.free_list
    for tally in (free_list.tally, free_list.every):
        tally.change("blocks", -1)
        tally.change("bytes", -block.size)
        tally.change_pending(1, block.size)
    shown = context or block.context
    memory.note(("free_requested", block.address, block.requested, free_list.stream, shown))
    if block.size >= memory.oversize:
        memory.counters.oversize_allocations.decrease(1)


def complete_free(block: Block, memory: DeviceMemory, context: Any = None) -> None:
    """Make a block inactive: it merges with its neighbours and can be used again."""
    free_list = block.free_list
    address, size, requested = block.address, block.size, block.requested
    shown = context or block.context
    memory.note(("free_completed", address, requested, free_list.stream, shown))
    block.context = None
    gained = [absorb(block, neighbour, mapped=True) for neighbour in (block.previous, block.next)]
    free_list.add(block)
    splits, split_bytes = -sum(bytes_ > 0 for bytes_ in gained), -sum(gained)
    if block.is_split:
        splits, split_bytes = splits + 1, split_bytes + block.size
    for tally in (free_list.tally, free_list.every):
        tally.change("splits", splits)
        tally.change("split_bytes", split_bytes)
        tally.change("requested", -requested)
        tally.change_pending(-1, -size)
