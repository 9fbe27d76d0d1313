"""Readings of an allocator: statistics and live blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from pytest_gpumem.allocator.blocks import SHARED_POOL, Block, PoolId
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.state import AllocatorState
from pytest_gpumem.allocator.statistics import Stat, memory_stats


class Readings(AllocatorState):
    """The part of an allocator that returns readings. All sizes are bytes."""

    __slots__ = ()

    def stats(self) -> dict[str, Any]:
        """Return the dict of ``torch._C._cuda_memoryStats(device)`` in this torch version."""
        return memory_stats(
            self._every,
            self._small.tally,
            self._large.tally,
            self.memory.counters,
            max_split_size=self._shown_max_split,
            private=self.pools.reserved,
            version=self.version,
        )

    def reset_peak_stats(self) -> None:
        """Set every peak to its current value (``reset_peak_memory_stats``)."""
        for tally in (self._every, self._small.tally, self._large.tally):
            tally.reset_peaks()
        for stat in self._rare_stats():
            stat.reset_peak()

    def reset_accumulated_stats(self) -> None:
        """Set counters that only grow to 0 (``reset_accumulated_memory_stats``)."""
        self.memory.counters.reset_counts()
        for tally in (self._small.tally, self._large.tally):
            tally.reset_totals()
        for stat in self._rare_stats():
            stat.reset_totals()

    def _rare_stats(self) -> Iterator[Stat]:
        yield self.memory.counters.oversize_allocations
        yield self.memory.counters.oversize_segments
        for scopes in self.pools.reserved.values():
            yield from scopes.values()

    @property
    def allocated(self) -> int:
        """Bytes in live blocks (``memory_allocated``)."""
        return self._every.bytes

    @property
    def reserved(self) -> int:
        """Bytes held from the device (``memory_reserved``)."""
        return self._every.reserved

    @property
    def active(self) -> int:
        """Bytes in live blocks, and in freed ones that another stream may still use."""
        return self._every.bytes + self._every.pending["bytes"]

    @property
    def inactive_split(self) -> int:
        """Bytes of free parts of segments that are partly in use (``inactive_split_bytes``)."""
        return self._every.split_bytes

    @property
    def requested(self) -> int:
        """Bytes requested for the active blocks."""
        return self._every.requested

    @property
    def peak_allocated(self) -> int:
        """Highest :attr:`allocated` since the last reset (``max_memory_allocated``)."""
        return self._every.highest

    @property
    def peak_reserved(self) -> int:
        """Highest :attr:`reserved` since the last reset (``max_memory_reserved``)."""
        return self._every.reserved_peak

    @property
    def free_memory(self) -> int:
        """Bytes free on the device, as in ``mem_get_info``."""
        return self.memory.free

    def block(self, address: int) -> int:
        """Return the size of the live block that starts at ``address``, in bytes."""
        found = self._live.get(address) or self._uses.live.get(address)
        size = self.memory.uncached.get(address) if found is None else found.size
        if size is None:
            raise self._not_live(address)
        return size

    def pool_of(self, address: int) -> PoolId:
        """Return the pool of the live block at ``address``; the shared one where there is none."""
        found = self._live.get(address) or self._uses.live.get(address)
        return SHARED_POOL if found is None else found.free_list.pool.identity

    def pool_addresses(self, pool: PoolId) -> set[int]:
        """Return the addresses of a private pool's live blocks (``checkPoolLiveAllocations``)."""
        identity = self.pools.get(pool).identity
        return {
            block.address
            for block in self._live_ones()
            if block.free_list.pool.identity == identity
        }

    def live_blocks(self) -> dict[int, int]:
        """Return the address and size of every live block."""
        return {block.address: block.size for block in self._live_ones()}

    def live_contexts(self) -> dict[int, Any]:
        """Return the contexts that ``malloc`` was given for live blocks, by address."""
        return {block.address: block.context for block in self._live_ones()}

    def every_block(self) -> Iterator[Block]:
        """Live and free blocks, in no order."""
        yield from self._live.values()
        yield from self._uses.blocks()
        for pool in self.pools:
            for free_list in pool.free_lists.values():
                yield from free_list.blocks.values()

    def is_pending(self, block: Block) -> bool:
        """Return whether the block was freed and another stream may still use it."""
        return self._uses.is_pending(block)

    def _live_ones(self) -> Iterator[Block]:
        return chain(self._live.values(), self._uses.live.values())

    def _not_live(self, address: int) -> AllocatorError:
        return AllocatorError(
            f"Address {address:#x} is not a live block of device {self.device}:"
            " it was never allocated, or it was freed already."
        )
