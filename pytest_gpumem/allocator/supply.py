"""The sources of a block besides the smallest one that fits in its free list.

A search under special settings, a new segment, cached memory released when the device is full, and
the error when that does not suffice: ``DeviceCachingAllocator::malloc`` of
c10/cuda/CUDACachingAllocator.cpp after ``get_free_block``.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from pytest_gpumem.allocator.blocks import (
    SHARED_POOL,
    SIZE_SHIFT,
    SMALL_SIZE,
    UNLIMITED,
    Block,
    FreeList,
    Pool,
    PoolId,
    segment_size,
)
from pytest_gpumem.allocator.device_memory import DeviceMemory, ExpandableSegments
from pytest_gpumem.allocator.messages import (
    OutOfMemory,
    OutOfMemoryFields,
    out_of_memory_message,
    rejection_message,
)
from pytest_gpumem.allocator.private_pools import Pools
from pytest_gpumem.allocator.releases import LENDS_FIRST, PEER_POOLS
from pytest_gpumem.allocator.settings import AllocatorSettings
from pytest_gpumem.allocator.stream_uses import StreamUses


class Supply:
    """The sources of blocks for the free lists of one device."""

    def __init__(self, device: int, pools: Pools, memory: DeviceMemory, uses: StreamUses) -> None:
        self.device = device
        self.version = pools.version
        self.expandable: ExpandableSegments | None = None
        """The expandable segments, if any settings have turned them on."""
        self._settings = AllocatorSettings(version=pools.version)
        self._pools = pools
        self._memory = memory
        self._uses = uses
        self._collects = False
        self._rejected = False
        """Whether ``throw_on_cudamalloc_oom`` refused the present request."""

    @property
    def only_best_fit(self) -> bool:
        """Whether a search only has to find the smallest block that fits."""
        return self._memory.oversize == UNLIMITED and self.expandable is None and not self._collects

    def configure(self, settings: AllocatorSettings) -> None:
        """Apply the settings."""
        self._settings = settings
        self._memory.oversize = settings.max_split_size or UNLIMITED
        self._collects |= settings.garbage_collection_threshold > 0.0
        if settings.expandable_segments:
            if self.expandable is None:
                self.expandable = ExpandableSegments(self._memory)
            self.expandable.address_space = settings.address_space(self._memory.total)
            self.expandable.large_page = settings.large_segment_size

    def find_or_obtain(
        self, free_list: FreeList, rounded: int, requested: int, context: Any
    ) -> Block:
        """Return a block of at least ``rounded`` bytes, out of its list; raise ``OutOfMemory``."""
        if not self.only_best_fit:
            found = self._find_cached(free_list, rounded)
            if found is not None:
                return found
        if self._collects and self._memory.limit is not None:
            self._collect_garbage(self._memory.limit, context)
        size = segment_size(rounded, self._settings.large_segment_size)
        self._rejected = False
        block = self._obtain(free_list, rounded, size, context)
        if block is None and not self._rejected:
            block = self._obtain_after_release(free_list, rounded, size, context)
        if block is not None:
            return block
        if self._rejected:
            raise OutOfMemory(rejection_message(requested), self.memory_fields(rounded, size))
        raise self._out_of_memory(free_list.stream, rounded, size, context)

    def empty_cache(self, pool: PoolId, context: Any) -> None:
        """Return every segment without a live block to the device, as ``Allocator.empty_cache``."""
        pools = self._pools
        if pool == SHARED_POOL and not self._uses.in_capture():
            self._synchronize_events()
            self._release_pool(pools.large, context)
            self._release_pool(pools.small, context)
        for private in [one for one in pools.by_id.values() if one.uses <= 0]:
            if pool == private.identity:
                self._synchronize_events(pool)
            elif pool != SHARED_POOL:
                continue
            self._release_pool(private.small, context)
            self._release_pool(private.large, context)
            if private.reserved["all"].current == 0:
                del pools.by_id[private.identity]

    def memory_fields(self, rounded: int, segment: int) -> OutOfMemoryFields:
        """Return the numbers of an error, for a request and the segment that it needs."""
        memory = self._memory
        return OutOfMemoryFields(
            device=self.device,
            segment=segment,
            requested=rounded,
            total=memory.total,
            free=memory.free,
            limit=memory.limit,
            allocated=memory.every.bytes,
            reserved=memory.every.reserved,
            process=memory.used_elsewhere + memory.every.reserved,
            others=memory.others,
            private_free=sum(
                block.size for pool in self._pools.private() for block in pool.free_blocks()
            ),
        )

    def _out_of_memory(self, stream: int, rounded: int, segment: int, context: Any) -> OutOfMemory:
        fields = self.memory_fields(rounded, segment)
        self._memory.note(("oom", fields.free, rounded, stream, context))
        self._memory.counters.num_ooms += 1
        message = out_of_memory_message(
            fields, self.version, expandable=self._settings.expandable_segments
        )
        error = OutOfMemory(message, fields)
        error.tried_everything = True
        return error

    def _obtain_after_release(
        self, free_list: FreeList, rounded: int, size: int, context: Any
    ) -> Block | None:
        """Find a block by the steps that torch takes, in order, when the device has no room.

        Pools that lend their free blocks come first since 2.11, and last in 2.8 to 2.10.
        """
        memory = self._memory
        block = self._find_lent(free_list, rounded) if self.version >= LENDS_FIRST else None
        if block is None and self._release_enough(free_list, rounded, context):
            block = self._obtain(free_list, rounded, size, context)
        if block is None and not self._uses.in_capture():
            self.empty_cache(SHARED_POOL, context)
            memory.counters.num_alloc_retries += 1
            block = self._obtain(free_list, rounded, size, context)
        if block is None and PEER_POOLS <= self.version < LENDS_FIRST:
            block = self._find_lent(free_list, rounded)
        return block

    def _obtain(self, free_list: FreeList, rounded: int, size: int, context: Any) -> Block | None:
        """Take memory from the device; None if it, or the memory fraction, has no room.

        ``throw_on_cudamalloc_oom`` (2.12) rejects a request beyond the fraction without asking.
        """
        memory = self._memory
        needed = memory.every.reserved + size
        if memory.limit is not None and needed > memory.limit:
            return None
        allowed = int(self._settings.per_process_memory_fraction * memory.total)
        if self._settings.throw_on_cudamalloc_oom and needed > allowed:
            memory.counters.num_oom_rejections += 1
            self._rejected = True
            return None
        if self.expandable is not None and self._settings.expandable_segments:
            return self.expandable.obtain(free_list, rounded, context)
        return memory.new_segment(free_list, size, context)

    def _find_lent(self, free_list: FreeList, rounded: int) -> Block | None:
        """Return a free block of a pool that lends (``try_mempool_fallback``): plain ones only."""
        if free_list.pool.identity != SHARED_POOL:
            return None
        for pool in self._pools.by_id.values():  # the oldest first
            if not pool.use_on_oom:
                continue
            lent = pool.side(small=rounded <= SMALL_SIZE).free_list(free_list.stream)
            block = self._take_fitting(lent, _smallest_plain(lent, rounded), rounded)
            if block is not None:
                return block
        return None

    def _find_cached(self, free_list: FreeList, rounded: int) -> Block | None:
        """Find the best fit with expandable segments or under ``max_split_size_mb``.

        The latter keeps large blocks for large requests.
        """
        if self._collects and self._memory.limit is not None:
            free_list.pool.clock += 1
        if self.expandable is not None and self._settings.expandable_segments:
            block = self.expandable.best_fit(free_list, rounded)
        else:
            block = _smallest_plain(free_list, rounded)
        return self._take_fitting(free_list, block, rounded)

    def _take_fitting(self, free_list: FreeList, block: Block | None, rounded: int) -> Block | None:
        """Return the block, out of its list, unless it is too large for the request."""
        limit = self._memory.oversize
        if block is None or rounded < limit <= block.size:
            return None
        if limit <= rounded and block.size >= rounded + self._settings.max_non_split_rounding:
            return None
        free_list.remove(block)
        return block

    def _collect_garbage(self, limit: int, context: Any) -> None:
        """Release whole segments of at least mean age, down to the threshold.

        ``garbage_collect_cached_blocks``: each round frees all of that age, not just enough.
        Expandable segments count for the mean and stay.
        """
        threshold = int(self._settings.garbage_collection_threshold * limit)
        excess = self._memory.every.reserved - threshold
        pool = self._pools.large
        ages = {
            block: pool.clock - block.born for block in pool.free_blocks() if not block.is_split
        }
        while ages and excess > 0:
            mean = sum(ages.values()) / len(ages)
            old = [
                block
                for block, age in ages.items()
                if age >= mean and not block.free_list.is_expandable
            ]
            if not old:
                return
            for block in old:
                excess -= block.size
                del ages[block]
                self._memory.release_segment(block, context)

    def _release_enough(self, free_list: FreeList, rounded: int, context: Any) -> bool:
        """Release the oversize blocks that make room for a request; return whether there are any.

        Oversize are those from ``max_split_size_mb`` on. ``release_available_cached_blocks`` takes
        one that is large enough, else from the largest down.
        """
        if self._memory.oversize == UNLIMITED:
            return False
        target = max(rounded, self._memory.oversize)
        keys = free_list.keys
        index = bisect_left(keys, target << SIZE_SHIFT)
        if index < len(keys):
            block = free_list.blocks[keys[index]]
            if not block.free_list.is_expandable:
                self._memory.release_segment(block, context)
                return True
        released = 0
        for key in reversed(keys[:index]):
            block = free_list.blocks[key]
            if released >= target or block.size < self._memory.oversize:
                break
            if not block.free_list.is_expandable:
                released += block.size
                self._memory.release_segment(block, context)
        return released >= target

    def _release_pool(self, pool: Pool, context: Any) -> None:
        """Release the segments of a pool that the device can take back (``release_blocks``)."""
        for block in pool.free_blocks():
            if not block.is_split and not block.free_list.is_expandable:
                self._memory.release_segment(block, context)
        if self.expandable is not None:
            self.expandable.release(pool, context)

    def _synchronize_events(self, pool: PoolId | None = None) -> None:
        """Wait for the streams that use freed blocks (``synchronize_and_free_events``)."""
        self._memory.counters.num_sync_all_streams += 1
        self._uses.synchronize(pool)


def _smallest_plain(free_list: FreeList, rounded: int) -> Block | None:
    """Return the smallest block that fits, of no expandable segment."""
    keys = free_list.keys
    for index in range(bisect_left(keys, rounded << SIZE_SHIFT), len(keys)):
        block = free_list.blocks[keys[index]]
        if not block.free_list.is_expandable:
            return block
    return None
