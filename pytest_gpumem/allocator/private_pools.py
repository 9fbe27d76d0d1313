"""Private pools: memory that only some allocations may use.

A CUDA graph has one, ``torch.cuda.MemPool`` makes others. While a scope is open, allocations that
its filter accepts go to its pool (``beginAllocateToPool`` of c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from pytest_gpumem.allocator import releases
from pytest_gpumem.allocator.blocks import SHARED_POOL, SMALL_SIZE, UNLIMITED, Pool, PoolId
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.releases import NUMBERED_BLOCKS, Version
from pytest_gpumem.allocator.statistics import QUANTITIES, Counters, Stat, Tally, stat_dict

Filter = Callable[[int], bool]
"""Function that returns whether an allocation goes to the pool, by its stream."""


@dataclass(eq=False)
class PrivatePool:
    """A private pool of one device, or the shared one."""

    identity: PoolId
    small: Pool
    large: Pool
    reserved: dict[str, Stat]
    """Bytes from the device by scope: all, small_pool, large_pool."""
    uses: int = 0
    """Graphs, scopes and pool objects that refer to it; at 0 its memory may be released."""
    no_split: bool = False
    use_on_oom: bool = False

    def side(self, *, small: bool) -> Pool:
        """Return the pool of its small or of its large blocks."""
        return self.small if small else self.large


class Pools:
    """The pools of one device and the scopes that route allocations.

    ``small`` and ``large`` are the shared ones; the rules are those of torch release ``version``.
    """

    def __init__(self, version: Version) -> None:
        self.version = version
        self.every = Tally()
        """The tally over all pools."""
        self._tallies = {True: Tally(), False: Tally()}
        self.by_id: dict[PoolId, PrivatePool] = {}
        self.scopes: dict[PoolId, Filter] = {}
        """The open scopes, in the order in which they were opened."""
        self.reserved: dict[PoolId, dict[str, Stat]] = {}
        """Reserved bytes of every pool that ever had any; they outlive the pool."""
        self._split_freely = False
        self._numbers = count() if version == NUMBERED_BLOCKS else None
        self.shared = self._make(SHARED_POOL)
        self.small, self.large = self.shared.small, self.shared.large

    def create(self, identity: PoolId, *, use_on_oom: bool = False, no_split: bool = False) -> None:
        """Make a private pool, or add a use to one that exists (``createOrIncrefPool``).

        ``use_on_oom`` lends its free blocks to all allocations when the device is full (2.8);
        ``no_split`` hands its segments out whole (2.10). These permissions only grow.

        Raises ``AllocatorError``: the pool is given up and waits for its memory to be released.
        """
        private = self.by_id.get(identity)
        if private is None:
            private = self.by_id[identity] = self._make(identity)
        elif private.uses == 0:
            raise AllocatorError(
                f"The memory pool {identity} was given up by everything that used it;"
                " its tensors must die and the cache be emptied before it can be used again."
            )
        private.uses += 1
        private.use_on_oom |= use_on_oom
        private.no_split |= no_split
        self._set_split(private)

    def get(self, identity: PoolId) -> PrivatePool:
        """Return the pool of that id; raise ``AllocatorError`` where there is none."""
        pool = self.by_id.get(identity)
        if pool is None:
            raise AllocatorError(f"Could not find pool of id {identity}.")
        return pool

    def open(self, identity: PoolId, accepts: Filter) -> None:
        """Route allocations to a pool (``beginAllocateToPool``); raise an error if it is open."""
        self.create(identity)
        if identity in self.scopes:
            raise AllocatorError("beginAllocateToPool: already recording to mempool_id")
        self.scopes[identity] = accepts

    def close(self, identity: PoolId) -> None:
        """End the scope of a pool (``endAllocateToPool``); raise an error where none is open."""
        if self.scopes.pop(identity, None) is None:
            raise AllocatorError("endAllocatePool: not currently recording to mempool_id")

    def release(self, identity: PoolId) -> None:
        """Remove one use (``releasePool``); a pool without uses can be returned to the device."""
        pool = self.get(identity)
        pool.uses -= 1
        pool.no_split &= pool.uses > 0

    def route(self, stream: int, *, small: bool) -> Pool:
        """Return the pool for an allocation on ``stream``."""
        latest_first = self.version >= releases.LAST_SCOPE_FIRST
        scopes = self.scopes.items()
        for identity, accepts in reversed(scopes) if latest_first else scopes:
            if accepts(stream):
                return self.by_id[identity].side(small=small)
        return self.shared.side(small=small)

    def get_or_create(self, identity: PoolId, *, small: bool) -> Pool:
        """Return the pool of that id, and create it if there is none."""
        if identity != SHARED_POOL and identity not in self.by_id:
            self.create(identity)
        return self.by_id.get(identity, self.shared).side(small=small)

    def private(self) -> Iterator[Pool]:
        """Yield both sides of every private pool."""
        for private in self.by_id.values():
            yield private.small
            yield private.large

    def __iter__(self) -> Iterator[Pool]:
        """Yield every pool, the shared ones first."""
        return chain((self.small, self.large), self.private())

    def split(self, *, freely: bool) -> None:
        """Set whether every pool splits off any remainder, as with expandable segments."""
        self._split_freely = freely
        for each in (self.shared, *self.by_id.values()):
            self._set_split(each)

    def count_reserved(self, pool: Pool, amount: int) -> None:
        """Count bytes that a pool got from the device, or returned, if it is a private one."""
        private = self.by_id.get(pool.identity)
        if private is not None:
            for scope in ("all", "small_pool" if pool.small else "large_pool"):
                private.reserved[scope].change(amount)
            self.reserved[pool.identity] = private.reserved

    def stats(self, counters: Counters, max_split_size: int) -> dict[str, Any]:
        """Return the nested dict of ``torch._C._cuda_memoryStats`` of that torch version."""
        names = "num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free"
        result: dict[str, Any] = {name: getattr(counters, name) for name in names.split()}
        result["max_split_size"] = max_split_size
        if self.version >= releases.OOM_REJECTIONS:
            result["num_oom_rejections"] = counters.num_oom_rejections
        tallies = self.small.tally, self.large.tally
        totals = [tally.allocated_and_freed() for tally in tallies]
        peaks = [tally.currents_and_peaks() for tally in (*tallies, self.every)]
        for at, quantity in enumerate(QUANTITIES):
            small, large = totals[0][at], totals[1][at]
            both = small[0] + large[0], small[1] + large[1]
            result[quantity] = {
                scope: stat_dict(*peaks[which][at], *total)
                for scope, which, total in (
                    ("all", 2, both),
                    ("small_pool", 0, small),
                    ("large_pool", 1, large),
                )
            }
        if self.version >= releases.BYTES_BY_POOL:
            result["reserved_bytes_by_private_pools"] = {
                pool_id: {scope: stat.to_dict() for scope, stat in scopes.items()}
                for pool_id, scopes in self.reserved.items()
            }
        result["oversize_allocations"] = counters.oversize_allocations.to_dict()
        result["oversize_segments"] = counters.oversize_segments.to_dict()
        return result

    def _set_split(self, private: PrivatePool) -> None:
        """Set the bytes that may remain of a block without it being split (``should_split``).

        The small pool, and every pool while expandable segments are on, splits off any remainder.
        """
        for pool in (private.small, private.large):
            above = 0 if pool.small or self._split_freely else SMALL_SIZE
            pool.split_above = UNLIMITED if private.no_split else above

    def _make(self, identity: PoolId) -> PrivatePool:
        small, large = (
            Pool(
                small=small,
                tally=self._tallies[small],
                every=self.every,
                identity=identity,
                numbers=self._numbers,
            )
            for small in (True, False)
        )
        # torch keeps these by id, whatever becomes of the pool.
        reserved = self.reserved.get(identity) or {
            scope: Stat() for scope in ("all", "small_pool", "large_pool")
        }
        return PrivatePool(identity, small, large, reserved)
