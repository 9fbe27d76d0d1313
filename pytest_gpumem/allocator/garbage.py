"""Garbage collection of cached segments: ``garbage_collection_threshold``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_gpumem.allocator.blocks import Block, Pool

if TYPE_CHECKING:
    Blocks = dict[int, Block]
else:
    Blocks = dict


class AgedBlocks(Blocks):
    """Free blocks by key, with the pool's clock at each insertion.

    It replaces the plain dict of a free list, so that the hot path has no code for ages.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self._born: dict[int, int] = {}

    def __setitem__(self, key: int, block: Block) -> None:
        self._born[key] = self._pool.clock
        super().__setitem__(key, block)

    def age(self, key: int) -> int:
        """Return the number of searches of the pool since the block was inserted (``gc_count``)."""
        return self._pool.clock - self._born[key]


def collect(pool: Pool, target: int, release: Callable[[Block], None]) -> None:
    """Release whole segments of at least mean age, until ``target`` bytes are reclaimed.

    ``garbage_collect_cached_blocks``: each round frees all that are old enough, not just enough.
    Expandable segments count for the mean and stay.
    """
    ages = {block: _age(block) for block in pool.free_blocks() if not block.is_split}
    reclaimed = 0
    while ages and reclaimed < target:
        mean = sum(ages.values()) / len(ages)
        old = [
            block
            for block, age in ages.items()
            if age >= mean and not block.free_list.is_expandable
        ]
        if not old:
            return
        for block in old:
            reclaimed += block.size
            del ages[block]
            release(block)


def _age(block: Block) -> int:
    blocks = block.free_list.blocks
    assert isinstance(blocks, AgedBlocks)
    return blocks.age(block.key)
