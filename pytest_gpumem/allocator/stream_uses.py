"""Frees of blocks that other streams use (``record_stream``), in two steps.

When the program frees such a block, torch records an event on each of these streams. Until the
events complete, the block is pending: no longer allocated, and still active. The next allocation
looks at them (``process_events`` of c10/cuda/CUDACachingAllocator.cpp). On a GPU that depends on
time. In this model an event has completed once the host waited for its stream (see
:class:`Timeline`), or when :data:`MOST_AHEAD` allocations were made after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pytest_gpumem.allocator.blocks import Block, PoolId
from pytest_gpumem.allocator.device_memory import DeviceMemory, absorb
from pytest_gpumem.allocator.trace import Marks, StreamKey, Timeline

MOST_AHEAD = 1024
"""Allocations after which an event counts as over even if the host never waited.

A stream's launch queue holds about a thousand kernels: then issuing another one blocks until the
oldest is done. The number was measured by users, NVIDIA does not document it, and kernels are
counted here by their outputs: an estimate.
"""


class _Use(NamedTuple):
    """Streams that used one block, besides its own."""

    streams: set[StreamKey]
    in_capture: set[StreamKey]
    """Streams noted during a capture: their uses end with it."""


class _Freed(NamedTuple):
    """A freed block, and an event on each stream that uses it."""

    block: Block
    events: Marks
    allocations: int
    """The number of allocations before it was freed."""


class StreamUses:
    """The blocks of one device that other streams use, live or freed.

    ``in_capture`` returns whether a capture forbids querying events.
    """

    def __init__(
        self, device: int, timeline: Timeline, memory: DeviceMemory, in_capture: Callable[[], bool]
    ) -> None:
        self.timeline = timeline
        self.live: dict[int, Block] = {}
        """By address: blocks in use by the program and by other streams."""
        self.held: dict[int, Block] = {}
        """By address: freed blocks that a recording completes."""
        self._device = device
        self._memory = memory
        self.in_capture = in_capture
        self._used: dict[Block, _Use] = {}
        self._freed: dict[tuple[StreamKey, ...], deque[_Freed]] = {}
        """Blocks whose events are not complete, by the streams that use them: the oldest first,
        whose events are complete before those of the others."""
        self._deferred: dict[Block, Marks] = {}
        """Blocks freed during a capture, with the marks to pass before the capture may use them."""
        self._allocations = 0

    @property
    def waiting(self) -> bool:
        """Whether a freed block waits for a stream, or for a capture to end."""
        return bool(self._freed or self._deferred)

    def blocks(self) -> Iterator[Block]:
        """Return every block in this collection."""
        yield from self.live.values()
        yield from (one.block for freed in self._freed.values() for one in freed)
        yield from self._deferred
        yield from self.held.values()

    def add(self, block: Block, stream: StreamKey) -> None:
        """Note that ``stream`` uses a live block."""
        self.live[block.address] = block
        use = self._used.setdefault(block, _Use(set(), set()))
        use.streams.add(stream)
        self.timeline.note(stream)
        if self.in_capture():
            use.in_capture.add(stream)

    def take(self, address: int) -> Block | None:
        """Remove and return a live block, whichever streams used it."""
        block = self.live.pop(address, None)
        if block is not None:
            del self._used[block]
        return block

    def free(self, block: Block, context: Any) -> None:
        """Free a block; it is pending until the streams that use it are done."""
        request_free(block, self._memory, context)
        del self.live[block.address]
        if self.in_capture():
            own = (self._device, int(block.free_list.stream))
            self._deferred[block] = self.timeline.mark(own, *self._used[block].streams)
        else:
            self._insert_events(block)

    def before_malloc(self, stream: int, *, reuse: bool) -> None:
        """Complete finished events (``prepare_for_malloc``).

        During a capture, with ``reuse``, a block of the requesting stream is free again where the
        captured work comes after all uses (``graph_capture_record_stream_reuse``).
        """
        self._allocations += 1
        if not self.in_capture():
            self._undefer()
            for streams, freed in list(self._freed.items()):
                while freed and self._is_over(freed[0]):
                    complete_free(freed.popleft().block, self._memory)
                if not freed:
                    del self._freed[streams]
        elif reuse:
            for block, marks in list(self._deferred.items()):
                own = int(block.free_list.stream)
                if own == stream and self.timeline.is_after((self._device, stream), marks):
                    del self._deferred[block], self._used[block]
                    complete_free(block, self._memory)

    def synchronize(self, pool: PoolId | None) -> None:
        """Wait for all events and complete their blocks; with ``pool``, those of a private one."""
        self._undefer()
        waited, self._freed = self._freed, {}
        for streams, freed in waited.items():
            for one in freed:
                if pool is None or one.block.free_list.pool.identity == pool:
                    complete_free(one.block, self._memory)
                else:
                    self._freed.setdefault(streams, deque()).append(one)

    def end_capture(self, pool: PoolId) -> None:
        """End the uses of a finished capture into ``pool``."""
        for block in list(self._deferred):
            if block.free_list.pool.identity == pool:
                del self._deferred[block]
                self._insert_events(block)

    def _insert_events(self, block: Block) -> None:
        """Record an event on each stream in use, but for those that only a capture used."""
        use = self._used.pop(block)
        streams = tuple(sorted(use.streams - use.in_capture))
        if not streams:
            complete_free(block, self._memory)
            return
        events = {stream: self.timeline.mark(stream)[stream] for stream in streams}
        freed = _Freed(block, events, self._allocations)
        self._freed.setdefault(streams, deque()).append(freed)

    def _undefer(self) -> None:
        deferred, self._deferred = self._deferred, {}
        for block in deferred:
            self._insert_events(block)

    def _is_over(self, freed: _Freed) -> bool:
        done = (self.timeline.is_finished(*event) for event in freed.events.items())
        return self._allocations - freed.allocations > MOST_AHEAD or all(done)


def request_free(block: Block, memory: DeviceMemory, context: Any = None) -> None:
    """Mark a block as freed by the program: it is no longer allocated, but active."""
    free_list = block.free_list
    for tally in (free_list.tally, free_list.every):
        tally.change("blocks", -1)
        tally.change("bytes", -block.size)
        tally.change_pending(1, block.size)
    shown = context or block.context
    memory.note(("free_requested", block.address, block.requested, free_list.stream, shown))
    if block.size >= memory.oversize:
        memory.counters.oversize_allocations.change(-1)


def complete_free(block: Block, memory: DeviceMemory, context: Any = None) -> None:
    """Make a block inactive: it merges with its neighbours and can be used again."""
    free_list = block.free_list
    address, size, requested = block.address, block.size, block.requested
    shown = context or block.context
    memory.note(("free_completed", address, requested, free_list.stream, shown))
    block.context = None
    gained = [absorb(block, neighbour, mapped=True) for neighbour in (block.previous, block.next)]
    free_list.add(block)
    splits, split_bytes = -sum(bytes_ > 0 for bytes_ in gained), -sum(gained)
    if block.is_split:
        splits, split_bytes = splits + 1, split_bytes + block.size
    for tally in free_list.split_tallies:
        tally.change("splits", splits)
        tally.change("split_bytes", split_bytes)
    for tally in (free_list.tally, free_list.every):
        tally.change("requested", -requested)
        tally.change_pending(-1, -size)
