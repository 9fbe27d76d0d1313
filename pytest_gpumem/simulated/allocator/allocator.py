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
    SIZE_SHIFT,
    Block,
    FreeList,
    Pool,
    new_block,
    split_threshold,
)
from pytest_gpumem.simulated.allocator.constants import SMALL_SIZE, TOO_LARGE, UNLIMITED
from pytest_gpumem.simulated.allocator.expandable import ExpandableSegments
from pytest_gpumem.simulated.allocator.garbage import AgedBlocks, collect
from pytest_gpumem.simulated.allocator.messages import (
    AllocatorError,
    OutOfMemory,
    OutOfMemoryFields,
    out_of_memory_message,
)
from pytest_gpumem.simulated.allocator.rounding import round_size, segment_size
from pytest_gpumem.simulated.allocator.settings import AllocatorSettings, Version
from pytest_gpumem.simulated.allocator.statistics import Counters, DeviceTally, memory_stats
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

    Raises:
        AllocatorError: the settings ask for something that is not simulated.
    """

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
        expandable = self.settings.expandable_segments
        self._small, self._large = (
            Pool(small=small, split_above=split_threshold(small=small, split_freely=expandable))
            for small in (True, False)
        )
        self._collects = self.settings.garbage_collection_threshold > 0.0
        if self._collects:
            self._small.make_blocks = self._large.make_blocks = AgedBlocks
        self._small_lists = self._small.free_lists
        self._large_lists = self._large.free_lists
        self._live: dict[int, Block] = {}
        self._segment_contexts: dict[int, Any] = {}
        self._every = DeviceTally()
        self._counters = Counters()
        self._limit: int | None = None
        divisions = self.settings.roundup_power2_divisions
        self._divisions = divisions if any(divisions) else None
        # Requests below this are rounded to 512 bytes and nothing else.
        self._plain_below = TOO_LARGE if self._divisions is None else 0
        self._max_split = self.settings.max_split_size or UNLIMITED
        self._split_below = UNLIMITED if expandable else self._max_split
        # Whether a search is nothing but best fit.
        self._common = self._max_split == UNLIMITED and not expandable and not self._collects
        self._expandable = (
            ExpandableSegments(
                total_memory,
                self.settings.large_segment_size,
                self._place_segment,
                self._map_pages,
                self._unmap_pages,
            )
            if expandable
            else None
        )
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
        else:
            rounded = self._round_uncommon(size)
            if rounded == 0:
                return 0
        if rounded <= SMALL_SIZE:
            free_list = self._small_lists.get(stream) or self._small.free_list(stream)
        else:
            free_list = self._large_lists.get(stream) or self._large.free_list(stream)
        tally = free_list.tally
        every = self._every

        keys = free_list.keys
        blocks = free_list.blocks
        index = bisect_left(keys, rounded << SIZE_SHIFT) if self._common else len(keys)
        if index < len(keys):
            block = blocks.pop(keys.pop(index))
        else:
            block = self._find_or_obtain(free_list, rounded, context)

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
            block.previous = previous
            block.next = tail
            if previous is not None:
                previous.next = block
            tail.previous = block
            tail.address = tail_address = address + rounded
            tail.size = remaining
            tail.key = key = (remaining << SIZE_SHIFT) + tail_address
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
        self._note(("alloc", address, size, stream, context))

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
            return self._refuse_free(address)
        free_list = block.free_list
        tally = free_list.tally
        every = self._every
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
        block.key = key = (merged_size << SIZE_SHIFT) + address
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

    def empty_cache(self) -> None:
        """Return every segment without a live block to the device."""
        self._counters.num_sync_all_streams += 1
        for pool in (self._large, self._small):
            if self._expandable is not None:
                self._expandable.release(pool)
                continue
            for block in pool.whole_segments():
                self._release_segment(block)

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

    def stats(self) -> dict[str, Any]:
        """What ``torch._C._cuda_memoryStats(device)`` returns in this torch version."""
        return memory_stats(
            self._every,
            self._small.tally,
            self._large.tally,
            self._counters,
            max_split_size=self.settings.max_split_size or -1,
            expandable=self._expandable is not None,
            version=self.version,
        )

    def reset_peak_stats(self) -> None:
        """Set every peak to its current value (``reset_peak_memory_stats``)."""
        for tally in (self._every, self._small.tally, self._large.tally, self._counters):
            tally.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        """Set what only counts up back to 0 (``reset_accumulated_memory_stats``)."""
        for tally in (self._small.tally, self._large.tally, self._counters):
            tally.reset_totals()

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` returns in this torch version."""
        return snapshots.snapshot([self])

    def segments(self, *, frames: bool = True) -> list[dict[str, Any]]:
        """The segments and their blocks, by address: ``snapshot()["segments"]``.

        Looking up the lines of ``frames`` takes most of the time.
        """
        return snapshots.segments(self, frames=frames)

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
        """Bytes in live blocks; no stream keeps a freed block in use here."""
        return self._every.bytes

    @property
    def requested(self) -> int:
        """Bytes that the live blocks were asked for."""
        return self._every.requested

    @property
    def peak_allocated(self) -> int:
        """Highest :attr:`allocated` since the last reset (``max_memory_allocated``)."""
        return self._every.bytes_peak

    @property
    def peak_reserved(self) -> int:
        """Highest :attr:`reserved` since the last reset (``max_memory_reserved``)."""
        return self._every.reserved_peak

    @property
    def free_memory(self) -> int:
        """Bytes free on the device, as ``mem_get_info`` says."""
        return max(0, self.total_memory - self.used_elsewhere - self._every.reserved)

    def block(self, address: int) -> int:
        """Size of the live block at ``address``, in bytes.

        Raises:
            AllocatorError: no live block starts there.
        """
        found = self._live.get(address)
        if found is None:
            raise self._not_live(address)
        return found.size

    def live_blocks(self) -> dict[int, int]:
        """Address and size of every live block."""
        return {address: block.size for address, block in self._live.items()}

    @property
    def device_frees(self) -> int:
        """How often memory was returned to the device."""
        return self._counters.num_device_free

    def restore(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Put an empty allocator into a given state: ``segments`` as a snapshot has them.

        Statistics count what is held, with no history before it.

        Raises:
            AllocatorError: the allocator is in use or its settings turn expandable segments on, or
                a segment belongs to a private pool.
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
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            raise AllocatorError(
                f"The segment at {segment['address']:#x} belongs to the private pool"
                f" {segment['segment_pool_id']}; private pools are not simulated."
            )
        pool = self._small if segment["segment_type"] == "small" else self._large
        free_list = pool.free_list(segment["stream"])
        whole = new_block(free_list, segment["address"], segment["total_size"])
        self._add_segment(whole)
        previous = None
        for each in segment["blocks"]:
            address = whole.address if previous is None else previous.address + previous.size
            block = new_block(free_list, address, each["size"])
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
        for pool in (self._small, self._large):
            for free_list in pool.free_lists.values():
                yield from free_list.blocks.values()

    def segment_context(self, address: int) -> Any:
        """The context of the allocation that needed the segment at ``address``, or None."""
        return self._segment_contexts.get(address)

    def _round_uncommon(self, size: int) -> int:
        if size < 0:
            raise AllocatorError(f"Cannot allocate {size} bytes: a size is 0 or more.")
        if size >= TOO_LARGE:
            message = "CUDA out of memory. Tried to allocate more than 1EB memory."
            raise OutOfMemory(message, self._memory_fields(size, size))
        return round_size(size, self._divisions) if size else 0

    def _refuse_free(self, address: int) -> None:
        if address:
            raise self._not_live(address)

    def _not_live(self, address: int) -> AllocatorError:
        return AllocatorError(
            f"Address {address:#x} is not a live block of device {self.device}:"
            " it was never allocated, or it was freed already."
        )

    def _note_split(self, free_list: FreeList, blocks: int, size: int) -> None:
        """A whole segment was split: its free part counts as inactive split."""
        tally = free_list.tally
        every = self._every
        tally.splits_in += blocks
        tally.splits_peak = max(tally.splits_peak, tally.splits_in - tally.splits_out)
        tally.split_bytes_in += size
        current = tally.split_bytes_in - tally.split_bytes_out
        tally.split_bytes_peak = max(tally.split_bytes_peak, current)
        every.splits += blocks
        every.splits_peak = max(every.splits_peak, every.splits)
        every.split_bytes += size
        every.split_bytes_peak = max(every.split_bytes_peak, every.split_bytes)

    def _find_or_obtain(self, free_list: FreeList, rounded: int, context: Any) -> Block:
        """A free block of at least ``rounded`` bytes, out of its list: cached or new."""
        if not self._common:
            found = self._find_uncommon(free_list, rounded)
            if found is not None:
                return found
        if self._collects and self._limit is not None:
            self._collect_garbage(self._limit)
        size = segment_size(rounded, self.settings.large_segment_size)
        block = self._obtain(free_list, rounded, size, context)
        if block is None and self._release_enough(free_list, rounded):
            block = self._obtain(free_list, rounded, size, context)
        if block is None:
            self.empty_cache()
            self._counters.num_alloc_retries += 1
            block = self._obtain(free_list, rounded, size, context)
        if block is None:
            raise self._out_of_memory(free_list.stream, rounded, size, context)
        return block

    def _obtain(self, free_list: FreeList, rounded: int, size: int, context: Any) -> Block | None:
        """Memory from the device; None if it, or the memory fraction, has no room."""
        if self._limit is not None and self._every.reserved + size > self._limit:
            return None
        if self._expandable is not None:
            return self._expandable.obtain(free_list, rounded, context)
        return self._new_segment(free_list, size, context)

    def _collect_garbage(self, limit: int) -> None:
        threshold = int(self.settings.garbage_collection_threshold * limit)
        excess = self._every.reserved - threshold
        if excess > 0 and self._expandable is None:
            collect(self._large, excess, self._release_segment)

    def _find_uncommon(self, free_list: FreeList, rounded: int) -> Block | None:
        """Best fit with expandable segments or under ``max_split_size_mb``.

        The latter keeps large blocks for large requests.
        """
        if self._collects and self._limit is not None:
            free_list.pool.clock += 1
        block = self._best_fit(free_list, rounded)
        if block is None:
            return None
        limit = self._max_split
        if rounded < limit <= block.size:
            return None
        if limit <= rounded and block.size >= rounded + self.settings.max_non_split_rounding:
            return None
        free_list.remove(block)
        return block

    def _best_fit(self, free_list: FreeList, rounded: int) -> Block | None:
        if self._expandable is not None:
            return self._expandable.best_fit(free_list, rounded)
        keys = free_list.keys
        index = bisect_left(keys, rounded << SIZE_SHIFT)
        return free_list.blocks[keys[index]] if index < len(keys) else None

    def _new_segment(self, free_list: FreeList, size: int, context: Any) -> Block | None:
        """Ask the device for a segment; None if it has no room."""
        if size > self.free_memory:
            return None
        address = self._place_segment(size)
        block = new_block(free_list, address, size)
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
        free_list.tally.reserved_out += size
        self._every.reserved -= size
        self._note(("segment_unmap", address, size, free_list.stream, context))

    def _reserve(self, free_list: FreeList, size: int) -> None:
        tally = free_list.tally
        every = self._every
        tally.reserved_in += size
        tally.reserved_peak = max(tally.reserved_peak, tally.reserved_in - tally.reserved_out)
        every.reserved += size
        every.reserved_peak = max(every.reserved_peak, every.reserved)

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
        tally.reserved_out += block.size
        self._every.segments -= 1
        self._every.reserved -= block.size
        if block.size >= self._max_split:
            self._counters.oversize_segments.decrease(1)

    def _release_enough(self, free_list: FreeList, rounded: int) -> bool:
        """With ``max_split_size_mb``, release just the oversize blocks that a request needs.

        ``release_available_cached_blocks``: one that is large enough, else from the largest down.
        """
        if self._max_split == UNLIMITED or self._expandable is not None:
            return False
        target = max(rounded, self._max_split)
        keys = free_list.keys
        index = bisect_left(keys, target << SIZE_SHIFT)
        if index < len(keys):
            self._release_segment(free_list.blocks[keys[index]])
            return True
        released = 0
        while keys and released < target:
            block = free_list.blocks[keys[-1]]
            if block.size < self._max_split:
                return False
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
        )

    def _out_of_memory(self, stream: int, rounded: int, segment: int, context: Any) -> OutOfMemory:
        fields = self._memory_fields(rounded, segment)
        self._note(("oom", fields.free, rounded, stream, context))
        self._counters.num_ooms += 1
        message = out_of_memory_message(
            fields, self.version, expandable=self.settings.expandable_segments
        )
        return OutOfMemory(message, fields)

    def _next_address(self, size: int) -> int:
        address = self._unused_address
        self._unused_address += size
        return address
