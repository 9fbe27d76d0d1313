"""The calls that make private pools, send allocations to them, and note captures."""

from __future__ import annotations

from pytest_gpumem.allocator.blocks import PoolId
from pytest_gpumem.allocator.private_pools import Filter
from pytest_gpumem.allocator.releases import REUSE_IN_CAPTURE
from pytest_gpumem.allocator.state import AllocatorState


class PoolScopes(AllocatorState):
    """The side of an allocator that CUDA graphs and ``torch.cuda.MemPool`` use."""

    __slots__ = ()

    def create_pool(
        self, pool: PoolId, *, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        """Make a private pool, or use one that exists once more (``createOrIncrefPool``).

        ``use_on_oom`` lends its free blocks to all allocations when the device is full (2.8);
        ``no_split`` hands its segments out whole (2.10).
        """
        self._pools.create(pool, use_on_oom=use_on_oom, no_split=no_split)

    def lend_pool(self, pool: PoolId, *, use_on_oom: bool) -> None:
        """Whether others may use the pool's free blocks when the device is full."""
        self._pools.get(pool).use_on_oom = use_on_oom

    def begin_allocate_to_pool(self, pool: PoolId, accepts: Filter) -> None:
        """Send allocations whose stream ``accepts`` returns true for to a private pool.

        Raises:
            AllocatorError: that is the case already, in torch's words.
        """
        self._pools.open(pool, accepts)
        self._route()

    def end_allocate_to_pool(self, pool: PoolId) -> None:
        """End the scope of :meth:`begin_allocate_to_pool`; the pool keeps its memory.

        Raises:
            AllocatorError: it was not begun, in torch's words.
        """
        self._pools.close(pool)
        if self.settings.graph_capture_record_stream_reuse and self.version >= REUSE_IN_CAPTURE:
            self._uses.end_capture(pool)
        self._route()

    def release_pool(self, pool: PoolId) -> None:
        """Remove one use of a private pool (``releasePool``).

        Raises:
            AllocatorError: there is no such pool.
        """
        self._pools.release(pool)

    def pool_uses(self, pool: PoolId) -> int:
        """Return the number of graphs, scopes and pool objects that refer to a private pool.

        Raises:
            AllocatorError: there is no such pool.
        """
        return self._pools.get(pool).uses

    def pool_addresses(self, pool: PoolId) -> set[int]:
        """Return the addresses of the live blocks of a private pool (``checkPoolLiveAllocations``).

        Raises:
            AllocatorError: there is no such pool.
        """
        identity = self._pools.get(pool).identity
        return {
            address
            for live in (self._live, self._uses.live)
            for address, block in live.items()
            if block.free_list.pool.identity == identity
        }

    def mark_capture_begin(self) -> None:
        """Note that a stream capture begins on this device."""
        self._captures += 1
        self._route()

    def mark_capture_end(self) -> None:
        """Note that a stream capture has ended."""
        self._captures -= 1
        self._route()
