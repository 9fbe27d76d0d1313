"""Checkpoints of private pools: how their segments are divided, to be restored later.

Source: getCheckpointState, setCheckpointPoolState and setSegmentStateToCheckpoint of
c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pytest_gpumem.allocator.blocks import Block, PoolId, new_block
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.trace import RawEntry


@dataclass(frozen=True)
class BlockState:
    """The saved state of one block; sizes are bytes."""

    address: int
    size: int
    is_live: bool


@dataclass(frozen=True)
class PoolState:
    """The saved state of a private pool."""

    pool: PoolId
    segments: tuple[tuple[BlockState, ...], ...]


def state_of(pool: PoolId, blocks: Iterable[Block]) -> PoolState:
    """Return the state of ``pool``, whose blocks are among ``blocks``."""
    heads = sorted(
        (
            block
            for block in blocks
            if block.previous is None and block.free_list.pool.identity == pool
        ),
        key=lambda block: block.address,
    )
    return PoolState(pool, tuple(tuple(_states(head)) for head in heads))


def _states(head: Block) -> Iterable[BlockState]:
    block: Block | None = head
    while block is not None:
        if block.is_mapped:
            yield BlockState(block.address, block.size, not block.key)
        block = block.next


def divide(
    segment: tuple[BlockState, ...], free: dict[int, Block], note: Callable[[RawEntry], None]
) -> list[Block]:
    """Allocate every block of ``segment``, which is whole and free, as it was divided.

    ``free`` has the free blocks of the pool by address.

    Raises:
        AllocatorError: there is no such segment any more.
    """
    made = []
    for at, state in enumerate(segment):
        block = free.pop(state.address, None)
        if block is None or block.size < state.size:
            raise AllocatorError(
                f"The memory pool has no free segment at {state.address:#x} any more, as it had"
                " when the checkpoint was taken."
            )
        was_split = block.is_split
        block.free_list.remove(block)
        if at + 1 < len(segment):
            tail = _split(block, state.size)
            free[tail.address] = tail
        _count(block, was_split=was_split, is_split=at + 1 < len(segment))
        block.requested = block.size
        note(("alloc", block.address, block.size, block.free_list.stream, None))
        made.append(block)
    return made


def _split(block: Block, size: int) -> Block:
    tail = new_block(block.free_list, block.address + size, block.size - size, block.shift)
    tail.previous, tail.next = block, block.next
    if tail.next is not None:
        tail.next.previous = tail
    block.next, block.size = tail, size
    tail.free_list.add(tail)
    return tail


def _count(block: Block, *, was_split: bool, is_split: bool) -> None:
    free_list = block.free_list
    if is_split and not was_split and block.next is not None:
        free_list.note_split(block.next.size)
    for tally in (free_list.tally, free_list.every):
        if was_split:
            tally.change("split_bytes", -block.size)
            if not is_split:
                tally.change("splits", -1)
        tally.change("blocks", 1)
        tally.change("bytes", block.size)
        tally.change("requested", block.size)
