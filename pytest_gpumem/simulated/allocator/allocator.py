"""An event-exact model of PyTorch's CUDACachingAllocator for one device.

The algorithm is that of ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp; every
step that is visible from outside (addresses, the order of events, statistics) is the same.
:meth:`Allocator.malloc` and :meth:`Allocator.free` are long because they are the hot path: a
simulated training step calls them hundreds of thousands of times.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pytest_gpumem.simulated.allocator import snapshot as snapshots
from pytest_gpumem.simulated.allocator.blocks import (
    FIRST_OF_AGE,
    SHARED_POOL,
    SIZE_SHIFT,
    Block,
    FreeList,
    Pool,
    PoolId,
    new_block,
    split_threshold,
)
from pytest_gpumem.simulated.allocator.constants import (
    MIN_BLOCK,
    SMALL_SIZE,
    TOO_LARGE,
    UNLIMITED,
)
from pytest_gpumem.simulated.allocator.expandable import ExpandableSegments, absorb
from pytest_gpumem.simulated.allocator.garbage import AgedBlocks, collect
from pytest_gpumem.simulated.allocator.messages import (
    AllocatorError,
    OutOfMemory,
    OutOfMemoryFields,
    out_of_memory_message,
    rejection_message,
)
from pytest_gpumem.simulated.allocator.private_pools import Filter, PrivatePool, PrivatePools
from pytest_gpumem.simulated.allocator.rounding import round_size, segment_size
from pytest_gpumem.simulated.allocator.settings import AllocatorSettings, SettingsError, Version
from pytest_gpumem.simulated.allocator.statistics import (
    Counters,
    DeviceTally,
    PoolTally,
    Stat,
    memory_stats,
)
from pytest_gpumem.simulated.allocator.stream_uses import StreamUses
from pytest_gpumem.simulated.allocator.timeline import Timeline
from pytest_gpumem.simulated.allocator.trace import FREE, RawEntry, Trace

FIRST_ADDRESS = 0x7F0000000000
"""Where the first segment of device 0 lands: looks like a pointer of a 64-bit Linux process."""
DEVICE_ADDRESSES = 1 << 44
"""Distance between the address ranges of two devices; freed ranges are not used again."""


_ignore: Callable[[object], None] = deque[object](maxlen=0).append
"""Called for every event when none are kept: a queue that holds nothing costs the least."""


class Allocator:
    """The caching allocator of one simulated device. All sizes are bytes.

    Args:
        total_memory: what the device has.
        settings: the configuration; torch's defaults when None.
        version: the torch release, (major, minor), whose rules hold.
        device: index, for messages and snapshots.
        used_elsewhere: device memory outside this allocator: the CUDA context, other processes.
            The attribute may be changed at any time.
        place_segment: given the size of a new segment, the address where the driver puts it. By
            default addresses increase from a base of the device and are never used again.
        record: whether to keep the events in :attr:`trace`.
        timeline: what the host knows of the progress of streams; one of its own when None.

    Raises:
        AllocatorError: the settings ask for something that is not simulated.
    """

    # Attributes in slots: an object with more than thirty would find them by hashing.
    __slots__ = (
        "_captures",
        "_collects",
        "_common",
        "_counters",
        "_divisions",
        "_every",
        "_expandable",
        "_large",
        "_large_lists",
        "_limit",
        "_live",
        "_max_split",
        "_note",
        "_place_segment",
        "_plain_below",
        "_pools",
        "_rejected",
        "_segment_contexts",
        "_shown_max_split",
        "_small",
        "_small_lists",
        "_split_above",
        "_split_below",
        "_uncached",
        "_unused_address",
        "_unused_order",
        "_uses",
        "caching",
        "device",
        "is_capturing",
        "settings",
        "total_memory",
        "trace",
        "used_elsewhere",
        "version",
    )

    def __init__(
        self,
        total_memory: int,
        settings: AllocatorSettings | None = None,
        version: Version = (2, 13),
        device: int = 0,
        *,
        used_elsewhere: int = 0,
        place_segment: Callable[[int], int] | None = None,
        record: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self.settings = AllocatorSettings(version=version) if settings is None else settings
        refusal = self.settings.refused()
        if refusal is not None:
            raise AllocatorError(refusal)
        self.version = version
        self.device = device
        self.total_memory = total_memory
        self.used_elsewhere = used_elsewhere
        self._place_segment = place_segment or self._next_address
        self._unused_address = FIRST_ADDRESS + device * DEVICE_ADDRESSES
        self._unused_order = FIRST_OF_AGE
        self._every = DeviceTally()
        self._small, self._large = (
            Pool(small=small, split_above=0, tally=PoolTally(), every=self._every)
            for small in (True, False)
        )
        self._small_lists = self._small.free_lists
        self._large_lists = self._large.free_lists
        self._live: dict[int, Block] = {}
        self._segment_contexts: dict[int, Any] = {}
        self._counters = Counters()
        self._limit: int | None = None
        self._rejected = False
        """Whether ``throw_on_cudamalloc_oom`` refused the present request."""
        self._expandable: ExpandableSegments | None = None
        self._collects = False
        # torch reads it when the process first uses the device, and not again.
        self._shown_max_split = self.settings.max_split_size or -1
        self._pools = PrivatePools(version, self._make_private_pool)
        self._captures = 0
        self.is_capturing: Callable[[], bool] = lambda: self._captures > 0
        """Whether the current stream is being captured; asked while a capture is under way."""
        self.caching = True
        """Off, every allocation comes from the device and goes back to it, and is not counted."""
        self._uncached: dict[int, int] = {}
        self._uses = StreamUses(
            device, timeline or Timeline(), self._complete_free, self._in_capture
        )
        self._configure()
        events: list[Any] = []
        self._note: Callable[[RawEntry], None] = events.extend if record else _ignore
        self.trace = Trace(events)
        """Every event so far, in order."""
        if self.settings.per_process_memory_fraction < 1.0:
            self.set_memory_fraction(self.settings.per_process_memory_fraction)

    def malloc(self, size: int, stream: int = 0, context: Any = None) -> int:
        """Allocate ``size`` bytes and return their address; 0 for no bytes, as torch does.

        ``context`` is kept with the block and its events; if it has an attribute ``frames`` (a list
        of dicts with filename, line and name), snapshots show these.

        Raises:
            OutOfMemory: neither the cache nor the device has room.
        """
        if 0 < size < self._plain_below:
            rounded = (size + 511) & -512
            if rounded <= SMALL_SIZE:
                free_list = self._small_lists.get(stream) or self._small.free_list(stream)
            else:
                free_list = self._large_lists.get(stream) or self._large.free_list(stream)
        elif size == 0 or not self.caching:
            return self._allocate_uncached(size)
        else:
            rounded, free_list = self._choose(size, stream)

        keys = free_list.keys
        blocks = free_list.blocks
        index = bisect_left(keys, rounded << SIZE_SHIFT) if self._common else len(keys)
        if index < len(keys):
            block = blocks.pop(keys.pop(index))
        else:
            block = self._find_or_obtain(free_list, rounded, size, context)
            # A block of an expandable segment, or of a pool that lends, is in another list.
            free_list = block.free_list
            keys = free_list.keys
            blocks = free_list.blocks

        tally = free_list.tally
        every = free_list.every
        address = block.address
        remaining = block.size - rounded
        previous = block.previous
        was_split = previous is not None or block.next is not None
        if remaining > free_list.split_above and rounded < self._split_below:
            tail = block
            block = Block()
            block.address = address
            block.size = rounded
            block.free_list = free_list
            block.shift = shift = tail.shift
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
            if was_split:
                tally.split_bytes_out += rounded
                every.split_bytes -= rounded
            else:
                self._note_split(free_list, 1, remaining)
        else:
            rounded = block.size
            if was_split:
                tally.splits_out += 1
                every.splits -= 1
                tally.split_bytes_out += rounded
                every.split_bytes -= rounded
        block.key = 0
        block.requested = size
        block.context = context
        self._live[address] = block
        self._note(("alloc", address, size, free_list.stream, context))

        tally.blocks_in = current = tally.blocks_in + 1
        current -= tally.blocks_out
        if current > tally.blocks_peak:
            tally.blocks_peak = current
        every.blocks = current = every.blocks + 1
        if current > every.blocks_peak:
            every.blocks_peak = current
        tally.bytes_in = current = tally.bytes_in + rounded
        current -= tally.bytes_out
        if current > tally.bytes_peak:
            tally.bytes_peak = current
        every.bytes = current = every.bytes + rounded
        if current > every.bytes_peak:
            every.bytes_peak = current
        tally.requested_in = current = tally.requested_in + size
        current -= tally.requested_out
        if current > tally.requested_peak:
            tally.requested_peak = current
        every.requested = current = every.requested + size
        if current > every.requested_peak:
            every.requested_peak = current
        if rounded >= self._max_split:
            self._counters.oversize_allocations.increase(1)
        return address

    def free(self, address: int, context: Any = None) -> None:
        """Give a block back; address 0 is ignored, as torch does.

        Raises:
            AllocatorError: no live block starts at ``address``.
        """
        block = self._live.pop(address, None)
        if block is None:
            return self._free_uncommon(address, context)
        free_list = block.free_list
        tally = free_list.tally
        every = free_list.every
        size = block.size
        requested = block.requested
        self._note((FREE, address, requested, free_list.stream, context or block.context))
        tally.blocks_out += 1
        every.blocks -= 1
        tally.bytes_out += size
        every.bytes -= size
        tally.requested_out += requested
        every.requested -= requested
        if size >= self._max_split:
            self._counters.oversize_allocations.decrease(1)

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

        if previous is None and following is None:
            tally.splits_out += absorbed
            every.splits -= absorbed
            tally.split_bytes_out += merged_size - size
            every.split_bytes -= merged_size - size
            return None
        tally.split_bytes_in = current = tally.split_bytes_in + size
        current -= tally.split_bytes_out
        if current > tally.split_bytes_peak:
            tally.split_bytes_peak = current
        every.split_bytes = current = every.split_bytes + size
        if current > every.split_bytes_peak:
            every.split_bytes_peak = current
        if absorbed == 0:
            tally.splits_in = current = tally.splits_in + 1
            current -= tally.splits_out
            if current > tally.splits_peak:
                tally.splits_peak = current
            every.splits = current = every.splits + 1
            if current > every.splits_peak:
                every.splits_peak = current
        elif absorbed == 2:
            tally.splits_out += 1
            every.splits -= 1
        return None

    def empty_cache(self, pool: PoolId = SHARED_POOL) -> None:
        """Return every segment without a live block to the device (``emptyCache``).

        Private pools only where nothing refers to them any more; with the id of such a ``pool``,
        that one alone. During a capture the shared pool keeps what it has.
        """
        if pool == SHARED_POOL and not self._in_capture():
            self._synchronize_events()
            self._release_pool(self._large)
            self._release_pool(self._small)
        for private in list(self._pools.freeable.values()):
            if pool == private.identity:
                self._synchronize_events(pool)
            elif pool != SHARED_POOL:
                continue
            self._release_pool(private.small)
            self._release_pool(private.large)
            if private.reserved["all"].current == 0:
                self._pools.forget(private)
                self._route()

    def record_stream(self, address: int, stream: int, device: int | None = None) -> None:
        """Another stream uses a live block: once freed, it stays active until that is over.

        ``stream`` is one of ``device``, by default of this one. A use on the block's own stream
        needs no care and is ignored, as in torch.

        Raises:
            AllocatorError: no live block starts at ``address``.
        """
        if address in self._uncached:
            return
        block = self._live.get(address) or self._uses.live.get(address)
        if block is None:
            raise self._not_live(address)
        key = (self.device if device is None else device, stream)
        if key != (self.device, block.free_list.stream):
            self._live.pop(address, None)
            self._uses.add(block, key)

    def request_free(self, address: int, context: Any = None) -> None:
        """Free a block and keep it active until :meth:`complete_free`, as a recording has it.

        Raises:
            AllocatorError: no live block starts at ``address``.
        """
        block = self._live.pop(address, None) or self._uses.take(address)
        if block is None:
            raise self._not_live(address)
        self._request_free(block, context)
        self._uses.hold(block)

    def complete_free(self, address: int, context: Any = None) -> None:
        """End what :meth:`request_free` began.

        Raises:
            AllocatorError: no block at ``address`` waits for this.
        """
        block = self._uses.release_held(address)
        if block is None:
            raise self._not_live(address)
        self._complete_free(block, context)

    def create_pool(
        self, pool: PoolId, *, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        """Make a private pool, or use one that exists once more (``createOrIncrefPool``).

        ``use_on_oom`` lends its free blocks to everybody when the device is full (2.8);
        ``no_split`` hands its segments out whole (2.10).
        """
        private = self._pools.refer(pool)
        private.use_on_oom = private.use_on_oom or use_on_oom
        private.no_split = private.no_split or no_split
        private.split_above(**self._split_above)

    def lend_pool(self, pool: PoolId, *, use_on_oom: bool) -> None:
        """Whether others may use the pool's free blocks when the device is full."""
        self._pools.get(pool).use_on_oom = use_on_oom

    def begin_allocate_to_pool(self, pool: PoolId, accepts: Filter) -> None:
        """Send allocations whose stream ``accepts`` says yes to to a private pool.

        Raises:
            AllocatorError: that is the case already, in torch's words.
        """
        self._pools.open(pool, accepts)
        self._pools.by_id[pool].split_above(**self._split_above)
        self._route()

    def end_allocate_to_pool(self, pool: PoolId) -> None:
        """End what :meth:`begin_allocate_to_pool` began; the pool keeps its memory.

        Raises:
            AllocatorError: it was not begun, in torch's words.
        """
        self._pools.close(pool)
        if self.settings.graph_capture_record_stream_reuse and self.version >= (2, 15):
            self._uses.end_capture(pool)
        self._route()

    def release_pool(self, pool: PoolId) -> None:
        """Something that referred to a private pool is gone (``releasePool``).

        Raises:
            AllocatorError: there is no such pool.
        """
        self._pools.release(pool)

    def pool_uses(self, pool: PoolId) -> int:
        """How many graphs, scopes and pool objects refer to a private pool.

        Raises:
            AllocatorError: there is no such pool.
        """
        return self._pools.get(pool).uses

    def mark_capture_begin(self) -> None:
        """A stream capture begins on this device."""
        self._captures += 1
        self._route()

    def mark_capture_end(self) -> None:
        """A stream capture has ended."""
        self._captures -= 1
        self._route()

    def set_settings(self, conf: str) -> None:
        """Read another configuration string at run time (``setAllocatorSettings``).

        Cached segments stay what they are; the memory fraction and ``max_split_size`` of the
        statistics are those of the start, as in torch.

        Raises:
            SettingsError: torch rejects it; what was read before the error holds, as in torch.
        """
        try:
            self.settings = AllocatorSettings.parse(conf, self.version, self.settings)
        except SettingsError as error:
            self.settings = error.settings or self.settings
            raise
        finally:
            self._configure()

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to a fraction of the device (``set_per_process_memory_fraction``).

        From 2.10 on a fraction of 1 lifts the limit; from 2.13 on the limit is rounded to the
        nearest byte, before that down.

        Raises:
            AllocatorError: ``fraction`` is not between 0 and 1.
        """
        if not 0.0 <= fraction <= 1.0:
            raise AllocatorError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        if self.version >= (2, 10) and fraction >= 1.0:
            self._limit = None
            return
        exact = fraction * self.total_memory
        self._limit = math.floor(exact + 0.5) if self.version >= (2, 13) else int(exact)

    @property
    def memory_fraction(self) -> float:
        """The fraction of the device that may be reserved (``get_per_process_memory_fraction``)."""
        return 1.0 if self._limit is None else self._limit / self.total_memory

    def stats(self) -> dict[str, Any]:
        """What ``torch._C._cuda_memoryStats(device)`` returns in this torch version."""
        return memory_stats(
            self._every,
            self._small.tally,
            self._large.tally,
            self._counters,
            max_split_size=self._shown_max_split,
            private=self._pools.reserved,
            version=self.version,
        )

    def reset_peak_stats(self) -> None:
        """Set every peak to its current value (``reset_peak_memory_stats``)."""
        for tally in (self._every, self._small.tally, self._large.tally, self._counters):
            tally.reset_peaks()
        for stat in self._private_stats():
            stat.peak = stat.current

    def reset_accumulated_stats(self) -> None:
        """Set what only counts up back to 0 (``reset_accumulated_memory_stats``)."""
        for tally in (self._small.tally, self._large.tally, self._counters):
            tally.reset_totals()
        for stat in self._private_stats():
            stat.allocated = stat.freed = 0

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` returns in this torch version."""
        return snapshots.snapshot([self])

    def segments(self, pool: PoolId = SHARED_POOL, *, frames: bool = True) -> list[dict[str, Any]]:
        """The segments and their blocks, by address: ``snapshot()["segments"]``.

        With the id of a private ``pool`` only its own. Looking up the lines of ``frames`` takes
        most of the time.
        """
        return snapshots.segments(self, pool, frames=frames)

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
    def requested(self) -> int:
        """Bytes that the active blocks were asked for."""
        return self._every.requested

    @property
    def peak_allocated(self) -> int:
        """Highest :attr:`allocated` since the last reset (``max_memory_allocated``)."""
        return self._every.current_and_peak("allocated_bytes")[1]

    @property
    def peak_reserved(self) -> int:
        """Highest :attr:`reserved` since the last reset (``max_memory_reserved``)."""
        return self._every.reserved_peak

    @property
    def free_memory(self) -> int:
        """Bytes free on the device, as ``mem_get_info`` says."""
        held = self._every.reserved + sum(self._uncached.values())
        return max(0, self.total_memory - self.used_elsewhere - held)

    def block(self, address: int) -> int:
        """Size of the live block at ``address``, in bytes.

        Raises:
            AllocatorError: no live block starts there.
        """
        found = self._live.get(address) or self._uses.live.get(address)
        if found is not None:
            return found.size
        if address in self._uncached:
            return self._uncached[address]
        raise self._not_live(address)

    def live_blocks(self) -> dict[int, int]:
        """Address and size of every live block."""
        live = {address: block.size for address, block in self._live.items()}
        return live | {address: block.size for address, block in self._uses.live.items()}

    def live_contexts(self) -> dict[int, Any]:
        """Address of every live block and the context that :meth:`malloc` was given for it."""
        return {address: block.context for address, block in self._live.items()}

    @property
    def device_frees(self) -> int:
        """How often memory was returned to the device."""
        return self._counters.num_device_free

    def restore(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Put an empty allocator into a given state: ``segments`` as a snapshot has them.

        Statistics count what is held, with no history before it.

        Raises:
            AllocatorError: the allocator is in use or its settings turn expandable segments on.
        """
        if self._every.reserved:
            raise AllocatorError("Only an allocator without segments can be restored to a state.")
        if self._expandable is not None:
            raise AllocatorError("An allocator with expandable segments cannot be restored.")
        for segment in segments:
            self._restore_segment(segment)
        self.reset_peak_stats()
        self.reset_accumulated_stats()

    def _restore_segment(self, segment: Mapping[str, Any]) -> None:
        pool = self._restored_pool(segment)
        free_list = pool.free_list(segment["stream"])
        whole = new_block(free_list, segment["address"], segment["total_size"], 0)
        self._add_segment(whole)
        previous = None
        for each in segment["blocks"]:
            address = whole.address if previous is None else previous.address + previous.size
            block = new_block(free_list, address, each["size"], 0)
            block.requested = each.get("requested_size", 0)
            block.previous = previous
            if previous is not None:
                previous.next = block
            previous = block
            if each["state"] == "inactive":
                free_list.add(block)
                if block.size < whole.size:
                    self._note_split(free_list, 1, block.size)
            else:
                self._live[address] = block
                self._count_live(block)

    def _restored_pool(self, segment: Mapping[str, Any]) -> Pool:
        small = segment["segment_type"] == "small"
        first, second = segment.get("segment_pool_id", SHARED_POOL)
        if (first, second) == SHARED_POOL:
            return self._small if small else self._large
        if (first, second) not in self._pools.by_id:
            self.create_pool((first, second))
        private = self._pools.by_id[first, second]
        return private.small if small else private.large

    def _count_live(self, block: Block) -> None:
        tally = block.free_list.tally
        tally.blocks_in += 1
        tally.bytes_in += block.size
        tally.requested_in += block.requested
        self._every.blocks += 1
        self._every.bytes += block.size
        self._every.requested += block.requested

    def every_block(self) -> Iterator[Block]:
        """Live and free blocks, in no order."""
        yield from self._live.values()
        yield from self._uses.blocks()
        for pool in (self._small, self._large, *self._pools.pools()):
            for free_list in pool.free_lists.values():
                yield from free_list.blocks.values()

    def is_pending(self, block: Block) -> bool:
        """Whether the block was freed and another stream may still use it."""
        return self._uses.is_pending(block)

    def segment_context(self, address: int) -> Any:
        """The context of the allocation that needed the segment at ``address``, or None."""
        return self._segment_contexts.get(address)

    def _configure(self) -> None:
        """Take over what the settings say."""
        settings = self.settings
        expandable = settings.expandable_segments
        divisions = settings.roundup_power2_divisions
        self._divisions = divisions if any(divisions) else None
        self._max_split = settings.max_split_size or UNLIMITED
        self._split_below = UNLIMITED if expandable else self._max_split
        self._split_above = {
            name: split_threshold(small=name == "small", split_freely=expandable)
            for name in ("small", "large")
        }
        self._small.split_when_above(self._split_above["small"])
        self._large.split_when_above(self._split_above["large"])
        for private in self._pools.by_id.values():
            private.split_above(**self._split_above)
        if settings.garbage_collection_threshold > 0.0 and not self._collects:
            self._collects = True
            self._small.replace_blocks(AgedBlocks)
            self._large.replace_blocks(AgedBlocks)
        if expandable:
            self._expand(settings.address_space(self.total_memory), settings.large_segment_size)
        # Whether a search is nothing but best fit.
        self._common = (
            self._max_split == UNLIMITED and self._expandable is None and not self._collects
        )
        self._route()

    def _expand(self, address_space: int, page: int) -> None:
        if self._expandable is None:
            self._expandable = ExpandableSegments(
                address_space, page, self._place, self._map_pages, self._unmap_pages
            )
        self._expandable.address_space = address_space
        self._expandable.large_page = page

    def _route(self) -> None:
        """Let requests take the short way through :meth:`malloc` where nothing else matters.

        Requests below ``_plain_below`` are rounded to 512 bytes and go to the shared pools, and
        no freed block waits for a stream.
        """
        plain = (
            self._divisions is None
            and self.caching
            and not self._pools.scopes
            and not self._uses.waiting
        )
        self._plain_below = TOO_LARGE if plain else 0

    def enable_caching(self, enabled: bool) -> None:
        """Turn caching on or off, as ``torch.cuda.caching_allocator_enable``."""
        self.caching = enabled
        self._route()

    def _choose(self, size: int, stream: int) -> tuple[int, FreeList]:
        """The rounded size of a request, and the free list that serves it."""
        if size < 0:
            raise AllocatorError(f"Cannot allocate {size} bytes: a size is 0 or more.")
        if size >= TOO_LARGE:
            message = "CUDA out of memory. Tried to allocate more than 1EB memory."
            raise OutOfMemory(message, self._memory_fields(size, size))
        self._uses.before_malloc(stream, reuse=self.settings.graph_capture_record_stream_reuse)
        rounded = round_size(size, self._divisions)
        private = self._pools.route(stream) if self._pools.scopes else None
        pool = self._pool_of(private, small=rounded <= SMALL_SIZE)
        self._route()
        return rounded, pool.free_list(stream)

    def _pool_of(self, private: PrivatePool | None, *, small: bool) -> Pool:
        if private is None:
            return self._small if small else self._large
        return private.small if small else private.large

    def _allocate_uncached(self, size: int) -> int:
        if size == 0:
            return 0
        if size > self.free_memory:
            raise OutOfMemory("CUDA error: out of memory", self._memory_fields(size, size))
        address = self._place_segment(-(-size // MIN_BLOCK) * MIN_BLOCK)
        self._uncached[address] = size
        return address

    def _free_uncommon(self, address: int, context: Any) -> None:
        """Free what is no ordinary live block."""
        if address in self._uncached:
            del self._uncached[address]
        elif address in self._uses.live:
            block = self._uses.live[address]
            self._request_free(block, context)
            self._uses.free(block)
            self._route()
        elif address:
            raise self._not_live(address)

    def _request_free(self, block: Block, context: Any) -> None:
        """A block is no longer allocated, but active."""
        free_list = block.free_list
        for tally in (free_list.tally, free_list.every):
            tally.change("blocks", -1)
            tally.change("bytes", -block.size)
            tally.change_pending(1, block.size)
        shown = context or block.context
        self._note(("free_requested", block.address, block.requested, free_list.stream, shown))
        if block.size >= self._max_split:
            self._counters.oversize_allocations.decrease(1)

    def _complete_free(self, block: Block, context: Any = None) -> None:
        """A block is no longer active: it merges with its neighbours and can be used again."""
        free_list = block.free_list
        address, size, requested = block.address, block.size, block.requested
        self._note(
            ("free_completed", address, requested, free_list.stream, context or block.context)
        )
        block.context = None
        gained = [
            absorb(block, neighbour, mapped=True) for neighbour in (block.previous, block.next)
        ]
        free_list.add(block)
        splits, split_bytes = -sum(bytes_ > 0 for bytes_ in gained), -sum(gained)
        if block.is_split:
            splits, split_bytes = splits + 1, split_bytes + block.size
        for tally in (free_list.tally, free_list.every):
            tally.change("splits", splits)
            tally.change("split_bytes", split_bytes)
            tally.change("requested", -requested)
            tally.change_pending(-1, -size)

    def _in_capture(self) -> bool:
        """Whether allocation must do without events (``is_capture_context``).

        Up to 2.12 any open scope counts, from 2.13 on only the capture of the current stream.
        """
        if self.version <= (2, 12):
            return bool(self._pools.scopes)
        return self._captures > 0 and self.is_capturing()

    def _synchronize_events(self, pool: PoolId | None = None) -> None:
        """Wait for the streams that use freed blocks (``synchronize_and_free_events``)."""
        self._counters.num_sync_all_streams += 1
        self._uses.synchronize(pool)
        self._route()

    def _release_pool(self, pool: Pool) -> None:
        """Return what the device can have back of a pool (``release_blocks``)."""
        for block in pool.free_blocks():
            if not block.is_split and not block.free_list.is_expandable:
                self._release_segment(block)
        if self._expandable is not None:
            self._expandable.release(pool)

    def _make_private_pool(self, identity: PoolId) -> PrivatePool:
        small, large = (
            Pool(
                small=shared.small,
                split_above=shared.split_above,
                tally=shared.tally,
                every=self._every,
                identity=identity,
            )
            for shared in (self._small, self._large)
        )
        # torch keeps these by id, whatever becomes of the pool.
        reserved = self._pools.reserved.get(identity) or {
            scope: Stat() for scope in ("all", "small_pool", "large_pool")
        }
        return PrivatePool(identity, small, large, reserved)

    def _private_stats(self) -> Iterator[Stat]:
        for scopes in self._pools.reserved.values():
            yield from scopes.values()

    def _not_live(self, address: int) -> AllocatorError:
        return AllocatorError(
            f"Address {address:#x} is not a live block of device {self.device}:"
            " it was never allocated, or it was freed already."
        )

    def _note_split(self, free_list: FreeList, blocks: int, size: int) -> None:
        """A whole segment was split: its free part counts as inactive split."""
        tally = free_list.tally
        every = free_list.every
        tally.splits_in += blocks
        tally.splits_peak = max(tally.splits_peak, tally.splits_in - tally.splits_out)
        tally.split_bytes_in += size
        current = tally.split_bytes_in - tally.split_bytes_out
        tally.split_bytes_peak = max(tally.split_bytes_peak, current)
        every.splits += blocks
        every.splits_peak = max(every.splits_peak, every.splits)
        every.split_bytes += size
        every.split_bytes_peak = max(every.split_bytes_peak, every.split_bytes)

    def _find_or_obtain(
        self, free_list: FreeList, rounded: int, requested: int, context: Any
    ) -> Block:
        """A free block of at least ``rounded`` bytes, out of its list: cached or new."""
        if not self._common:
            found = self._find_uncommon(free_list, rounded)
            if found is not None:
                return found
        if self._collects and self._limit is not None:
            self._collect_garbage(self._limit)
        size = segment_size(rounded, self.settings.large_segment_size)
        self._rejected = False
        block = self._obtain(free_list, rounded, size, context)
        if block is None and not self._rejected:
            block = self._obtain_after_release(free_list, rounded, size, context)
        if block is not None:
            return block
        if self._rejected:
            message = rejection_message(requested)
            raise OutOfMemory(message, self._memory_fields(rounded, size))
        raise self._out_of_memory(free_list.stream, rounded, size, context)

    def _obtain_after_release(
        self, free_list: FreeList, rounded: int, size: int, context: Any
    ) -> Block | None:
        """What torch tries when the device has no room, in its order.

        Pools that lend their free blocks are asked first since 2.11, and last in 2.8 to 2.10.
        """
        block = self._find_lent(free_list, rounded) if self.version >= (2, 11) else None
        if block is None and self._release_enough(free_list, rounded):
            block = self._obtain(free_list, rounded, size, context)
        if block is None and not self._in_capture():
            self.empty_cache()
            self._counters.num_alloc_retries += 1
            block = self._obtain(free_list, rounded, size, context)
        if block is None and (2, 8) <= self.version <= (2, 10):
            block = self._find_lent(free_list, rounded)
        return block

    def _find_lent(self, free_list: FreeList, rounded: int) -> Block | None:
        """A free block of a pool that lends (``try_mempool_fallback``): plain ones only."""
        if free_list.pool.identity != SHARED_POOL:
            return None
        for private in self._pools.overflow():
            pool = self._pool_of(private, small=rounded <= SMALL_SIZE)
            lent = pool.free_list(free_list.stream)
            block = self._take_fitting(lent, self._smallest_plain(lent, rounded), rounded)
            if block is not None:
                return block
        return None

    def _obtain(self, free_list: FreeList, rounded: int, size: int, context: Any) -> Block | None:
        """Memory from the device; None if it, or the memory fraction, has no room.

        ``throw_on_cudamalloc_oom`` (2.12) notes where it would be too much before asking.
        """
        if self._limit is not None and self._every.reserved + size > self._limit:
            return None
        if self.settings.throw_on_cudamalloc_oom:
            allowed = int(self.settings.per_process_memory_fraction * self.total_memory)
            if self._every.reserved + size > allowed:
                self._counters.num_oom_rejections += 1
                self._rejected = True
                return None
        if self._expandable is not None and self.settings.expandable_segments:
            return self._expandable.obtain(free_list, rounded, context)
        return self._new_segment(free_list, size, context)

    def _collect_garbage(self, limit: int) -> None:
        threshold = int(self.settings.garbage_collection_threshold * limit)
        excess = self._every.reserved - threshold
        if excess > 0:
            collect(self._large, excess, self._release_segment)

    def _find_uncommon(self, free_list: FreeList, rounded: int) -> Block | None:
        """Best fit with expandable segments or under ``max_split_size_mb``.

        The latter keeps large blocks for large requests.
        """
        if self._collects and self._limit is not None:
            free_list.pool.clock += 1
        return self._take_fitting(free_list, self._best_fit(free_list, rounded), rounded)

    def _take_fitting(self, free_list: FreeList, block: Block | None, rounded: int) -> Block | None:
        """The block, out of its list, unless it is too large for the request."""
        limit = self._max_split
        if block is None or rounded < limit <= block.size:
            return None
        if limit <= rounded and block.size >= rounded + self.settings.max_non_split_rounding:
            return None
        free_list.remove(block)
        return block

    def _best_fit(self, free_list: FreeList, rounded: int) -> Block | None:
        if self._expandable is not None and self.settings.expandable_segments:
            return self._expandable.best_fit(free_list, rounded)
        return self._smallest_plain(free_list, rounded)

    def _smallest_plain(self, free_list: FreeList, rounded: int) -> Block | None:
        """The smallest block that fits, of no expandable segment."""
        keys = free_list.keys
        for index in range(bisect_left(keys, rounded << SIZE_SHIFT), len(keys)):
            block = free_list.blocks[keys[index]]
            if not block.free_list.is_expandable:
                return block
        return None

    def _new_segment(self, free_list: FreeList, size: int, context: Any) -> Block | None:
        """Ask the device for a segment; None if it has no room."""
        if size > self.free_memory:
            return None
        address, shift = self._place(size)
        block = new_block(free_list, address, size, shift)
        self._add_segment(block)
        self._counters.num_device_alloc += 1
        if context is not None:
            self._segment_contexts[address] = context
        self._note(("segment_alloc", address, size, free_list.stream, context))
        return block

    def _map_pages(self, free_list: FreeList, address: int, size: int, context: Any) -> bool:
        """Ask the device for pages of an expandable segment; False if it has no room."""
        if size > self.free_memory:
            return False
        self._reserve(free_list, size)
        self._counters.num_device_alloc += 1
        if context is not None:
            self._segment_contexts.setdefault(address, context)
        self._note(("segment_map", address, size, free_list.stream, context))
        return True

    def _unmap_pages(self, free_list: FreeList, address: int, size: int) -> None:
        context = self._segment_contexts.pop(address, None)
        self._counters.num_device_free += 1
        self._unreserve(free_list, size)
        self._note(("segment_unmap", address, size, free_list.stream, context))

    def _reserve(self, free_list: FreeList, size: int) -> None:
        tally = free_list.tally
        every = self._every
        tally.reserved_in += size
        tally.reserved_peak = max(tally.reserved_peak, tally.reserved_in - tally.reserved_out)
        every.reserved += size
        every.reserved_peak = max(every.reserved_peak, every.reserved)
        self._count_private(free_list.pool, size)

    def _unreserve(self, free_list: FreeList, size: int) -> None:
        free_list.tally.reserved_out += size
        self._every.reserved -= size
        self._count_private(free_list.pool, -size)

    def _count_private(self, pool: Pool, amount: int) -> None:
        private = self._pools.by_id.get(pool.identity)
        if private is not None:
            private.change_reserved(pool, amount)
            self._pools.reserved[pool.identity] = private.reserved

    def _add_segment(self, block: Block) -> None:
        tally = block.free_list.tally
        every = self._every
        self._reserve(block.free_list, block.size)
        tally.segments_in += 1
        tally.segments_peak = max(tally.segments_peak, tally.segments_in - tally.segments_out)
        every.segments += 1
        every.segments_peak = max(every.segments_peak, every.segments)
        if block.size >= self._max_split:
            self._counters.oversize_segments.increase(1)

    def _release_segment(self, block: Block) -> None:
        """Return a free block that is a whole segment to the device."""
        free_list = block.free_list
        free_list.remove(block)
        context = self._segment_contexts.pop(block.address, None)
        self._counters.num_device_free += 1
        self._note(("segment_free", block.address, block.size, free_list.stream, context))
        tally = free_list.tally
        tally.segments_out += 1
        self._every.segments -= 1
        self._unreserve(free_list, block.size)
        if block.size >= self._max_split:
            self._counters.oversize_segments.decrease(1)

    def _release_enough(self, free_list: FreeList, rounded: int) -> bool:
        """With ``max_split_size_mb``, release just the oversize blocks that a request needs.

        ``release_available_cached_blocks``: one that is large enough, else from the largest down.
        """
        if self._max_split == UNLIMITED:
            return False
        target = max(rounded, self._max_split)
        keys = free_list.keys
        index = bisect_left(keys, target << SIZE_SHIFT)
        if index < len(keys):
            block = free_list.blocks[keys[index]]
            if not block.free_list.is_expandable:
                self._release_segment(block)
                return True
        released = 0
        for key in reversed(keys[:index]):
            block = free_list.blocks[key]
            if released >= target or block.size < self._max_split:
                break
            if not block.free_list.is_expandable:
                released += block.size
                self._release_segment(block)
        return released >= target

    def _memory_fields(self, rounded: int, segment: int) -> OutOfMemoryFields:
        return OutOfMemoryFields(
            device=self.device,
            segment=segment,
            requested=rounded,
            total=self.total_memory,
            free=self.free_memory,
            limit=self._limit,
            allocated=self._every.bytes,
            reserved=self._every.reserved,
            process=self.used_elsewhere + self._every.reserved,
            private_free=sum(
                block.size for pool in self._pools.pools() for block in pool.free_blocks()
            ),
            address_space=self.settings.address_space(self.total_memory)
            if self.settings.expandable_segments
            else None,
        )

    def _out_of_memory(self, stream: int, rounded: int, segment: int, context: Any) -> OutOfMemory:
        fields = self._memory_fields(rounded, segment)
        self._note(("oom", fields.free, rounded, stream, context))
        self._counters.num_ooms += 1
        message = out_of_memory_message(
            fields, self.version, expandable=self.settings.expandable_segments
        )
        return OutOfMemory(message, fields)

    def _place(self, size: int) -> tuple[int, int]:
        """Address and shift of a new segment: since 2.13 older ones are used first.

        BlockComparatorSizeCounterAddress; before, it was the address that decided.
        """
        address = self._place_segment(size)
        if self.version < (2, 13):
            return address, 0
        order, self._unused_order = self._unused_order, self._unused_order + size
        return address, order - address

    def _next_address(self, size: int) -> int:
        address = self._unused_address
        self._unused_address += size
        return address
