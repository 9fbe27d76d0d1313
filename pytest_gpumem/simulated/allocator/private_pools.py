"""Private pools: memory that only some allocations may use.

A CUDA graph has one, ``torch.cuda.MemPool`` makes others. While a scope is open, allocations that
its filter accepts go to its pool (``beginAllocateToPool`` of c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pytest_gpumem.simulated.allocator.blocks import Pool, PoolId
from pytest_gpumem.simulated.allocator.constants import UNLIMITED
from pytest_gpumem.simulated.allocator.messages import AllocatorError
from pytest_gpumem.simulated.allocator.settings import Version
from pytest_gpumem.simulated.allocator.statistics import Stat

LAST_SCOPE_FIRST: Version = (2, 10)
"""Up to 2.9 the scope opened first decides, from then on the one opened last."""

Filter = Callable[[int], bool]
"""Given the stream of an allocation, whether it goes to the pool."""


@dataclass(eq=False)
class PrivatePool:
    """One private pool of one device."""

    identity: PoolId
    small: Pool
    large: Pool
    reserved: dict[str, Stat]
    """Bytes from the device by scope: all, small_pool, large_pool."""
    uses: int = 1
    """Graphs, scopes and pool objects that refer to it; at 0 its memory may be released."""
    no_split: bool = False
    use_on_oom: bool = False

    def split_above(self, *, small: int, large: int) -> None:
        """Set from which remainder on blocks are split; a pool made so never splits."""
        self.small.split_when_above(UNLIMITED if self.no_split else small)
        self.large.split_when_above(UNLIMITED if self.no_split else large)

    def change_reserved(self, pool: Pool, amount: int) -> None:
        """Note bytes that came from the device for one side of the pool, or went back."""
        for scope in ("all", "small_pool" if pool.small else "large_pool"):
            stat = self.reserved[scope]
            if amount > 0:
                stat.increase(amount)
            else:
                stat.decrease(-amount)


@dataclass(eq=False)
class PrivatePools:
    """The private pools of one device, and the scopes that route allocations to them."""

    version: Version
    make: Callable[[PoolId], PrivatePool]
    by_id: dict[PoolId, PrivatePool] = field(default_factory=dict)
    freeable: dict[PoolId, PrivatePool] = field(default_factory=dict)
    """Pools that nothing refers to any more."""
    scopes: list[tuple[PoolId, Filter]] = field(default_factory=list)
    reserved: dict[PoolId, dict[str, Stat]] = field(default_factory=dict)
    """Reserved bytes of every pool that ever had any: they outlive the pool."""

    def refer(self, identity: PoolId) -> PrivatePool:
        """The pool, new or with one more use (``createOrIncrefPool``).

        Raises:
            AllocatorError: the pool is given up and waits for its memory to be released.
        """
        pool = self.by_id.get(identity)
        if pool is None:
            pool = self.by_id[identity] = self.make(identity)
            return pool
        if pool.uses == 0:
            raise AllocatorError(
                f"The memory pool {identity} was given up by everything that used it;"
                " its tensors must die and the cache be emptied before it can be used again."
            )
        pool.uses += 1
        return pool

    def get(self, identity: PoolId) -> PrivatePool:
        """The pool of that id.

        Raises:
            AllocatorError: there is none.
        """
        pool = self.by_id.get(identity)
        if pool is None:
            raise AllocatorError(f"Could not find pool of id {identity}.")
        return pool

    def open(self, identity: PoolId, accepts: Filter) -> None:
        """Route allocations from now on (``beginAllocateToPool``).

        Raises:
            AllocatorError: a scope of this pool is open already; torch's words.
        """
        self.refer(identity)
        if any(identity == other for other, _ in self.scopes):
            raise AllocatorError("beginAllocateToPool: already recording to mempool_id")
        self.scopes.append((identity, accepts))

    def close(self, identity: PoolId) -> None:
        """End the scope of a pool (``endAllocateToPool``).

        Raises:
            AllocatorError: none is open; torch's words.
        """
        for index, (other, _) in enumerate(self.scopes):
            if other == identity:
                del self.scopes[index]
                return
        raise AllocatorError("endAllocatePool: not currently recording to mempool_id")

    def release(self, identity: PoolId) -> None:
        """One use less (``releasePool``); what nothing uses can be returned to the device."""
        pool = self.get(identity)
        pool.uses -= 1
        if pool.uses == 0:
            self.freeable[identity] = pool
            pool.no_split = False

    def forget(self, pool: PrivatePool) -> None:
        """Drop a pool that has no memory left."""
        del self.by_id[pool.identity], self.freeable[pool.identity]

    def route(self, stream: int) -> PrivatePool | None:
        """The pool that an allocation on ``stream`` goes to; ``None`` for the shared one."""
        latest_first = self.version >= LAST_SCOPE_FIRST
        for identity, accepts in reversed(self.scopes) if latest_first else self.scopes:
            if accepts(stream):
                return self.by_id[identity]
        return None

    def overflow(self) -> Iterator[PrivatePool]:
        """Pools that others may use when the device is full (``use_on_oom``), oldest first."""
        return (pool for pool in self.by_id.values() if pool.use_on_oom)

    def pools(self) -> Iterator[Pool]:
        """Both sides of every pool."""
        for pool in self.by_id.values():
            yield pool.small
            yield pool.large
