"""Blocks that other streams than their own use (``record_stream``).

When such a block is freed, torch records an event on each of these streams; the block stays active
until the events complete, which the next allocation looks at (``process_events`` of
c10/cuda/CUDACachingAllocator.cpp). On a GPU that depends on time. In this model an event has
completed once the host waited for its stream (see :class:`Timeline`), or when :data:`MOST_AHEAD`
allocations were made after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pytest_gpumem.allocator.blocks import Block, PoolId
from pytest_gpumem.allocator.trace import Marks, StreamKey, Timeline

MOST_AHEAD = 1024
"""Allocations after which an event counts as over even if the host never waited.

A stream's launch queue holds about a thousand kernels: then issuing another one blocks until the
oldest is done. The number was measured by users, NVIDIA does not document it, and kernels are
counted here by their outputs: an estimate.
"""


@dataclass(eq=False)
class _Use:
    """Streams that used one block, besides its own."""

    block: Block
    streams: set[StreamKey] = field(default_factory=set)
    in_capture: set[StreamKey] = field(default_factory=set)
    """Streams noted during a capture: their uses end with it."""


@dataclass(eq=False)
class _Event:
    time: int
    allocations: int
    block: Block


class StreamUses:
    """The blocks of one device that other streams use, live or freed.

    Args:
        device: index of the device.
        timeline: the progress of streams as known to the host.
        complete: called with a block that is no longer active.
        in_capture: whether a capture forbids to look at events.
    """

    def __init__(
        self,
        device: int,
        timeline: Timeline,
        complete: Callable[[Block], None],
        in_capture: Callable[[], bool],
    ) -> None:
        self.timeline = timeline
        self.live: dict[int, Block] = {}
        """By address: blocks in use by the program and by other streams."""
        self._device = device
        self._complete = complete
        self._in_capture = in_capture
        self._used: dict[Block, _Use] = {}
        self._events: dict[StreamKey, deque[_Event]] = {}
        self._outstanding: dict[Block, int] = {}
        """Freed blocks and how many of their events are not complete."""
        self._deferred: dict[Block, Marks | None] = {}
        """Blocks freed during a capture, with the marks to pass before the capture may use them."""
        self._held: dict[int, Block] = {}
        self._allocations = 0

    @property
    def waiting(self) -> bool:
        """Whether a freed block waits for a stream, or for a capture to end."""
        return bool(self._events or self._deferred)

    def blocks(self) -> Iterator[Block]:
        """Return every block in this collection."""
        yield from self.live.values()
        yield from self._outstanding
        yield from self._deferred
        yield from self._held.values()

    def is_pending(self, block: Block) -> bool:
        """Return whether the block was freed and is still active."""
        return (
            block in self._outstanding
            or block in self._deferred
            or self._held.get(block.address) is block
        )

    def add(self, block: Block, stream: StreamKey) -> None:
        """``stream`` uses a live block."""
        self.live[block.address] = block
        use = self._used.setdefault(block, _Use(block))
        use.streams.add(stream)
        self.timeline.note(stream)
        if self._in_capture():
            use.in_capture.add(stream)

    def take(self, address: int) -> Block | None:
        """Remove and return a live block, whichever streams used it."""
        block = self.live.pop(address, None)
        if block is not None:
            del self._used[block]
        return block

    def hold(self, block: Block) -> None:
        """Keep a freed block until :meth:`release_held`."""
        self._held[block.address] = block

    def release_held(self, address: int) -> Block | None:
        """Remove and return the kept block, if there is one."""
        return self._held.pop(address, None)

    def free(self, block: Block) -> None:
        """Hold back a block freed by the program until the streams that use it are done."""
        del self.live[block.address]
        if self._in_capture():
            self._deferred[block] = self._free_marks(block)
        else:
            self._insert_events(block)

    def before_malloc(self, stream: int, *, reuse: bool) -> None:
        """Complete finished events (``prepare_for_malloc``).

        During a capture, with ``reuse``, a block of the requesting stream is free again where the
        captured work comes after all uses (``graph_capture_record_stream_reuse``).
        """
        self._allocations += 1
        if not self._in_capture():
            self._undefer()
            self._process_events()
        elif reuse:
            self._free_safe(stream)

    def synchronize(self, pool: PoolId | None) -> None:
        """Wait for all events and complete their blocks; with ``pool``, those of a private one."""
        self._undefer()
        for stream in list(self._events):
            kept = deque[_Event]()
            for event in self._events[stream]:
                if pool is None or event.block.free_list.pool.identity == pool:
                    self._one_less(event.block)
                else:
                    kept.append(event)
            self._keep(stream, kept)

    def end_capture(self, pool: PoolId) -> None:
        """End the uses of a finished capture into ``pool``."""
        for block in list(self._deferred):
            if block.free_list.pool.identity == pool:
                del self._deferred[block]
                self._insert_events(block)

    def _free_marks(self, block: Block) -> Marks:
        own = (self._device, int(block.free_list.stream))
        return self.timeline.mark(own, *self._used[block].streams)

    def _insert_events(self, block: Block) -> None:
        """Record an event on each stream in use, but for those that only a capture used."""
        use = self._used.pop(block)
        streams = sorted(use.streams - use.in_capture)
        if not streams:
            self._complete(block)
            return
        self._outstanding[block] = len(streams)
        for stream in streams:
            time = self.timeline.mark(stream)[stream]
            events = self._events.setdefault(stream, deque())
            events.append(_Event(time, self._allocations, block))

    def _undefer(self) -> None:
        deferred, self._deferred = self._deferred, {}
        for block in deferred:
            self._insert_events(block)

    def _process_events(self) -> None:
        for stream in list(self._events):
            events = self._events[stream]
            while events and self._is_over(stream, events[0]):
                self._one_less(events.popleft().block)
            self._keep(stream, events)

    def _is_over(self, stream: StreamKey, event: _Event) -> bool:
        return (
            self.timeline.is_finished(stream, event.time)
            or self._allocations - event.allocations > MOST_AHEAD
        )

    def _keep(self, stream: StreamKey, events: deque[_Event]) -> None:
        if events:
            self._events[stream] = events
        else:
            del self._events[stream]

    def _one_less(self, block: Block) -> None:
        self._outstanding[block] -= 1
        if self._outstanding[block] == 0:
            del self._outstanding[block]
            self._complete(block)

    def _free_safe(self, stream: int) -> None:
        key = (self._device, stream)
        for block, marks in list(self._deferred.items()):
            own = int(block.free_list.stream)
            if marks is not None and own == stream and self.timeline.is_after(key, marks):
                del self._deferred[block], self._used[block]
                self._complete(block)
