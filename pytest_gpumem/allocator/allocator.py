"""An event-exact model of PyTorch's CUDACachingAllocator for one device.

The algorithm is that of ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp; every
step that is visible from outside (addresses, the order of events, statistics) is the same.
:meth:`Allocator.malloc` and :meth:`Allocator.free` are long because they are the hot path: a
simulated training step calls them hundreds of thousands of times.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_gpumem.allocator import snapshot as snapshots
from pytest_gpumem.allocator.blocks import (
    SHARED_POOL,
    SIZE_SHIFT,
    SMALL_SIZE,
    TOO_LARGE,
    Block,
    FreeList,
    PoolId,
    round_size,
)
from pytest_gpumem.allocator.messages import AllocatorError, OutOfMemory
from pytest_gpumem.allocator.snapshot import PoolState
from pytest_gpumem.allocator.state import AllocatorState
from pytest_gpumem.allocator.stream_uses import complete_free, request_free
from pytest_gpumem.allocator.trace import FREE


class Allocator(AllocatorState):
    """The caching allocator of one simulated device. All sizes are bytes.

    Args:
        total_memory: the device's memory.
        settings: the configuration; torch's defaults when None.
        version: the torch release, (major, minor), whose rules hold.
        device: index, for messages and snapshots.
        used_elsewhere: device memory outside this allocator: the CUDA context, other processes.
        place_segment: given the size of a new segment, the address where the driver puts it. By
            default addresses increase from a base of the device and are never used again.
        timeline: the progress of streams as known to the host; a new one when None.

    Raises ``AllocatorError``: a setting is not simulated.
    """

    __slots__ = ()

    def malloc(self, size: int, stream: int = 0, context: Any = None) -> int:
        """Allocate ``size`` bytes and return their address; 0 for no bytes, as torch does.

        ``context`` is kept with the block and its events; if it has an attribute ``frames`` (a list
        of dicts with filename, line and name), snapshots show these.

        Raises ``OutOfMemory``: neither the cache nor the device has room.
        """
        if 0 < size < self._plain_below:
            rounded = (size + 511) & -512
            if rounded <= SMALL_SIZE:
                free_list = self._small_lists.get(stream) or self._small.free_list(stream)
            else:
                free_list = self._large_lists.get(stream) or self._large.free_list(stream)
        elif size == 0:
            return 0
        else:
            rounded, free_list = self._choose(size, stream)

        keys = free_list.keys
        blocks = free_list.blocks
        index = bisect_left(keys, rounded << SIZE_SHIFT) if self._only_best_fit else len(keys)
        if index < len(keys):
            block = blocks.pop(keys.pop(index))
        else:
            block = self._supply.find_or_obtain(free_list, rounded, size, context)
            # A block of an expandable segment, or of a pool that lends, is in another list.
            free_list = block.free_list
            keys = free_list.keys
            blocks = free_list.blocks

        pool = free_list.pool
        tally = free_list.tally
        every = free_list.every
        splits, every_splits = free_list.split_tallies
        address = block.address
        remaining = block.size - rounded
        previous = block.previous
        was_split = previous is not None or block.next is not None
        if remaining > pool.split_above and rounded < self._split_below:
            tail = block
            block = Block()
            block.address = address
            block.size = rounded
            block.free_list = free_list
            block.shift = shift = tail.shift
            if pool.numbers is not None:
                block.shift = next(pool.numbers) - address
                tail.shift = shift = shift - rounded
            block.previous = previous
            block.next = tail
            if previous is not None:
                previous.next = block
            tail.previous = block
            tail.address = tail_address = address + rounded
            tail.size = remaining
            tail.key = key = (remaining << SIZE_SHIFT) + tail_address + shift
            insort(keys, key)
            blocks[key] = tail
            tail.born = pool.clock
            if was_split:
                splits.split_bytes_out += rounded
                splits.split_bytes -= rounded
                every_splits.split_bytes -= rounded
            else:
                free_list.note_split(remaining)
        else:
            rounded = block.size
            if was_split:
                splits.splits_out += 1
                splits.splits -= 1
                every_splits.splits -= 1
                splits.split_bytes_out += rounded
                splits.split_bytes -= rounded
                every_splits.split_bytes -= rounded
        block.key = 0
        block.requested = size
        block.context = context
        self._live[address] = block
        self._note(("alloc", address, size, free_list.stream, context))

        tally.blocks = current = tally.blocks + 1
        if current > tally.blocks_peak:
            tally.blocks_peak = current
        every.blocks = current = every.blocks + 1
        if current > every.blocks_peak:
            every.blocks_peak = current
        tally.bytes = current = tally.bytes + rounded
        if current > tally.bytes_peak:
            tally.bytes_peak = current
        every.bytes = current = every.bytes + rounded
        if current > every.bytes_peak:
            every.bytes_peak = current
        tally.requested = current = tally.requested + size
        if current > tally.requested_peak:
            tally.requested_peak = current
        every.requested = current = every.requested + size
        if current > every.requested_peak:
            every.requested_peak = current
        if rounded >= self._max_split:
            self.memory.counters.oversize_allocations.change(1)
        return address

    def free(self, address: int, context: Any = None) -> None:
        """Free a block; address 0 is ignored, as in torch.

        Raises ``AllocatorError``: no live block starts at ``address``.
        """
        block = self._live.pop(address, None)
        if block is None:
            return self._free_uncommon(address, context)
        free_list = block.free_list
        tally = free_list.tally
        every = free_list.every
        splits, every_splits = free_list.split_tallies
        size = block.size
        requested = block.requested
        self._note((FREE, address, requested, free_list.stream, context or block.context))
        tally.blocks_out += 1
        tally.blocks -= 1
        every.blocks -= 1
        tally.bytes_out += size
        tally.bytes -= size
        every.bytes -= size
        tally.requested_out += requested
        tally.requested -= requested
        every.requested -= requested
        if size >= self._max_split:
            self.memory.counters.oversize_allocations.change(-1)

        block.context = None
        merged_size = size
        absorbed = 0
        keys = free_list.keys
        blocks = free_list.blocks
        previous = block.previous
        if previous is not None:
            key = previous.key
            if key:
                del keys[bisect_left(keys, key)]
                del blocks[key]
                absorbed = 1
                merged_size += previous.size
                if free_list.pool.numbers is not None:
                    block.shift += address - previous.address
                block.address = address = previous.address
                block.previous = previous = previous.previous
                if previous is not None:
                    previous.next = block
        following = block.next
        if following is not None:
            key = following.key
            if key:
                del keys[bisect_left(keys, key)]
                del blocks[key]
                absorbed += 1
                merged_size += following.size
                block.next = following = following.next
                if following is not None:
                    following.previous = block
        block.size = merged_size
        block.key = key = (merged_size << SIZE_SHIFT) + address + block.shift
        insort(keys, key)
        blocks[key] = block
        block.born = free_list.pool.clock

        if previous is None and following is None:
            splits.splits_out += absorbed
            splits.splits -= absorbed
            every_splits.splits -= absorbed
            splits.split_bytes_out += merged_size - size
            splits.split_bytes -= merged_size - size
            every_splits.split_bytes -= merged_size - size
            return None
        splits.split_bytes = current = splits.split_bytes + size
        if current > splits.split_bytes_peak:
            splits.split_bytes_peak = current
        every_splits.split_bytes = current = every_splits.split_bytes + size
        if current > every_splits.split_bytes_peak:
            every_splits.split_bytes_peak = current
        if absorbed == 0:
            splits.splits = current = splits.splits + 1
            if current > splits.splits_peak:
                splits.splits_peak = current
            every_splits.splits = current = every_splits.splits + 1
            if current > every_splits.splits_peak:
                every_splits.splits_peak = current
        elif absorbed == 2:
            splits.splits_out += 1
            splits.splits -= 1
            every_splits.splits -= 1
        return None

    def empty_cache(self, pool: PoolId = SHARED_POOL, context: Any = None) -> None:
        """Return every segment without a live block to the device (``emptyCache``).

        Segments of a private pool are returned only if nothing refers to the pool; with the id of
        such a ``pool``, only its own are. During a capture the shared pool keeps its segments.
        ``context`` is kept with the events of the returned segments.
        """
        self._supply.empty_cache(pool, context)
        self._route()

    def record_stream(self, address: int, stream: int, device: int | None = None) -> None:
        """Record another stream's use of a live block: once freed, it stays active until that ends.

        ``stream`` is one of ``device``, by default of this one. A use on the block's own stream
        has no effect, as in torch.

        Raises ``AllocatorError``: no live block starts at ``address``.
        """
        block = self._live.get(address) or self._uses.live.get(address)
        if block is None:
            raise self._not_live(address)
        key = (self.device if device is None else device, stream)
        if key != (self.device, block.free_list.stream):
            self._live.pop(address, None)
            self._uses.add(block, key)

    def request_free(self, address: int, context: Any = None) -> None:
        """Free a block and keep it active until :meth:`complete_free`, as a recording has it.

        Raises ``AllocatorError``: no live block starts at ``address``.
        """
        block = self._live.pop(address, None) or self._uses.take(address)
        if block is None:
            raise self._not_live(address)
        request_free(block, self.memory, context)
        self._uses.held[address] = block

    def complete_free(self, address: int, context: Any = None) -> None:
        """Complete a free that :meth:`request_free` began.

        Raises ``AllocatorError``: no block at ``address`` waits for this.
        """
        block = self._uses.held.pop(address, None)
        if block is None:
            raise self._not_live(address)
        complete_free(block, self.memory, context)

    def snapshot(self) -> dict[str, Any]:
        """Return the dict of ``torch.cuda.memory._snapshot()`` in this torch version."""
        return snapshots.snapshot([self])

    def segments(self, pool: PoolId = SHARED_POOL, *, frames: bool = True) -> list[dict[str, Any]]:
        """Return the segments and their blocks, by address: ``snapshot()["segments"]``.

        With the id of a private ``pool``, only the pool's. Looking up the lines of ``frames`` takes
        most of the time.
        """
        return snapshots.segments(self, pool, frames=frames)

    def restore(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Put an empty allocator into a given state: ``segments`` as a snapshot has them.

        Statistics count the held memory, without history.

        Raises ``AllocatorError``: it has segments, or needs expandable ones and cannot have them.
        """
        if self._every.reserved:
            raise AllocatorError("Only an allocator without segments can be restored to a state.")
        expandable = self._supply.expandable
        for block, states in snapshots.restored(segments, self.pools, self.memory, expandable):
            self._divide(block, states)
        self.trace.clear()
        self.reset_peak_stats()
        self.reset_accumulated_stats()

    def pool_state(self, pool: PoolId) -> PoolState:
        """Return how the segments of a private pool are divided now (``getCheckpointState``)."""
        identity = self.pools.get(pool).identity
        return PoolState(identity, self.segments(identity, frames=False))

    def set_pool_state(self, state: PoolState) -> tuple[set[int], set[int]]:
        """Divide a private pool as it was (``setCheckpointPoolState``), and free its live blocks.

        Returns the addresses that were freed, and those that are live now.

        Raises ``AllocatorError``: there is no such pool, or it lacks a segment that it had.
        """
        freed = self.pool_addresses(state.pool)
        for address in freed:
            Allocator.free(self, address)
        live: set[int] = set()
        for segment in state.segments:
            private = self.pools.get(state.pool)
            blocks = (*private.small.free_blocks(), *private.large.free_blocks())
            address, size = segment["address"], segment["total_size"]
            whole = next((block for block in blocks if block.address == address), None)
            if whole is None or whole.size < size:
                raise AllocatorError(
                    f"The memory pool has no free segment at {address:#x} any more, as it had"
                    " when the checkpoint was taken."
                )
            states = [{**each, "requested_size": each["size"]} for each in segment["blocks"]]
            live |= self._divide(whole, states)
        return freed, live

    def _divide(self, block: Block, states: Sequence[Mapping[str, Any]]) -> set[int]:
        """Divide a free block as ``states`` describe; return the addresses that are live then."""
        blocks = snapshots.divide(block, states, self.memory)
        self._live |= {each.address: each for each in blocks}
        live = set()
        for each, state in zip(blocks, states, strict=True):
            if state["state"] == "inactive":
                Allocator.free(self, each.address)
            else:
                live.add(each.address)
        return live

    def _choose(self, size: int, stream: int) -> tuple[int, FreeList]:
        """Return the rounded size of a request, and the free list that serves it."""
        if size < 0:
            raise AllocatorError(f"Cannot allocate {size} bytes: a size is 0 or more.")
        if size >= TOO_LARGE:
            message = "CUDA out of memory. Tried to allocate more than 1EB memory."
            raise OutOfMemory(message, self._supply.memory_fields(size, size))
        self._uses.before_malloc(stream, reuse=self.settings.graph_capture_record_stream_reuse)
        rounded = round_size(size, self._divisions)
        pool = self.pools.route(stream, small=rounded <= SMALL_SIZE)
        self._route()
        return rounded, pool.free_list(stream)

    def _free_uncommon(self, address: int, context: Any) -> None:
        """Free an address that is not an ordinary live block."""
        if address in self._uses.live:
            self._uses.free(self._uses.live[address], context)
            self._route()
        elif address:
            raise self._not_live(address)
