"""The allocator's events, in order, and the progress of streams as the host can infer it.

A GPU runs the work of a stream in order and of different streams in no order, later than the host
issues it; how much later is not modelled. So work counts as finished once the host has waited
for it: for its stream, for its device, or for a stream or event that comes after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from operator import itemgetter
from typing import Any, NamedTuple, overload

from pytest_gpumem.allocator.recording import Json, SnapshotError

FREE = "free"
"""Recorded for a free that completes at once: it reads as two events, requested and completed."""

RawEntry = tuple[str, int, int, int, Any]
"""action, address, size, stream, context.

The allocator appends these five to one flat list: keeping a tuple per event would cost more than
all else that it does for the event.
"""


class TraceEntry(NamedTuple):
    """An event, as in ``torch.cuda.memory._snapshot()["device_traces"]``.

    ``size`` is the requested size for ``alloc``, ``free_requested`` and ``free_completed``, the
    segment's for ``segment_*``, the rounded request for ``oom``; ``addr`` of an ``oom`` holds the
    device's free bytes.
    """

    action: str
    addr: int
    size: int
    stream: int
    context: Any = None

    @property
    def pool_id(self) -> tuple[int, int]:
        """The private pool of the memory; (0, 0) for the shared one."""
        pool_id: tuple[int, int] = getattr(self.stream, "pool_id", (0, 0))
        return pool_id


class Contexts(IntEnum):
    """Events with stacks: ``RecordContext`` of c10/cuda/CUDACachingAllocator.h."""

    NEVER = 0
    STATE = 1
    """Stacks of blocks that are in use."""
    ALLOC = 2
    """Also stacks of allocation events; frees show the stack of their allocation."""
    ALL = 3
    """Also stacks of frees."""


class Recording(NamedTuple):
    """The arguments of the last call of ``torch.cuda.memory._record_memory_history``."""

    on: bool = True
    contexts: Contexts = Contexts.ALL
    with_cpp: bool = False
    """Whether C++ frames precede Python's."""
    max_entries: int | None = None
    """The number of events kept, the latest ones; ``None`` for all."""
    skipped: frozenset[str] = frozenset()
    """Actions of which no event is kept."""


class Trace(Sequence[TraceEntry]):
    """A view of the recorded events; it follows the allocator while more are recorded."""

    def __init__(self, raw: list[Any]) -> None:
        self._raw = raw
        self._read = 0
        self._entries: list[TraceEntry] = []
        self._shown_from = 0
        self._changes: list[tuple[int, Recording]] = []
        """Positions at which :attr:`recording` changed, and the new values."""

    @property
    def recording(self) -> Recording | None:
        """The recording in effect; ``None`` before the first request."""
        return self._changes[-1][1] if self._changes else None

    @property
    def shown(self) -> list[tuple[int, TraceEntry]]:
        """The events of a snapshot, by position: as in torch, none from before recording began.

        Before the first call of ``_record_memory_history`` all events are shown.
        """
        entries = list(enumerate(self[self._shown_from :], self._shown_from))
        recording = self.recording
        if recording is None:
            return entries
        if not recording.on:
            return []
        if any(each.skipped for _, each in self._changes):
            of_each = [self.recorded(at) for at, _ in entries]
            pairs = zip(entries, of_each, strict=True)
            entries = [one for one, made in pairs if not made or one[1].action not in made.skipped]
        most = recording.max_entries
        return entries if most is None else entries[-max(most, 1) :]

    def recorded(self, index: int) -> Recording | None:
        """Return the recording in effect when event ``index`` happened."""
        position = bisect_right(self._changes, index, key=itemgetter(0))
        return self._changes[position - 1][1] if position else None

    def record(self, recording: Recording, *, clear: bool = False) -> None:
        """Apply ``torch.cuda.memory._record_memory_history`` to snapshots.

        Source: ``recordHistory`` in c10/cuda/CUDACachingAllocator.cpp; ending clears, too.
        """
        before = self.recording
        if clear or before is None or recording.on != before.on:
            self._shown_from = len(self)
        self._changes.append((len(self), recording))

    def __len__(self) -> int:
        return len(self._current())

    @overload
    def __getitem__(self, index: int) -> TraceEntry: ...

    @overload
    def __getitem__(self, index: slice) -> list[TraceEntry]: ...

    def __getitem__(self, index: int | slice) -> TraceEntry | list[TraceEntry]:
        return self._current()[index]

    @property
    def position(self) -> int:
        """The number of events that :meth:`raw` would yield from the beginning."""
        return len(self._raw) // 5

    def raw(self, position: int) -> Iterator[RawEntry]:
        """Yield the events from ``position`` on as they were recorded, :data:`FREE` as one."""
        items = iter(self._raw[position * 5 :])
        return zip(*[items] * 5, strict=True)

    def clear(self) -> None:
        """Delete the events so far."""
        self._raw.clear()
        self._entries.clear()
        self._read = self._shown_from = 0
        self._changes = [(0, recording) for _, recording in self._changes]

    def _current(self) -> list[TraceEntry]:
        entries = self._entries
        items = iter(self._raw[self._read :])
        for action, address, size, stream, context in zip(*[items] * 5, strict=True):
            if action is FREE:
                entries.append(TraceEntry("free_requested", address, size, stream, context))
                action = "free_completed"
            entries.append(TraceEntry(action, address, size, stream, context))
        self._read = len(self._raw)
        return entries


StreamKey = tuple[int, int]
"""Device index and stream handle."""

Marks = dict[StreamKey, int]
"""A set of points, one on each stream: everything issued to that stream up to then."""


class Timeline:
    """Points in time on the streams of a machine, and those that the host has seen complete."""

    __slots__ = ("_after", "_done", "_now")

    def __init__(self) -> None:
        self._now = 0
        self._after: dict[StreamKey, Marks] = {}
        self._done: Marks = {}

    def mark(self, *streams: StreamKey) -> Marks:
        """Return the work of ``streams`` so far, and what it waited for (``cudaEventRecord``)."""
        self._now += 1
        marks: Marks = {}
        for stream in streams:
            _merge(marks, self._after.get(stream, {}))
            marks[stream] = self._now
        return marks

    def wait(self, stream: StreamKey, marks: Marks) -> None:
        """Make later work of ``stream`` begin after ``marks`` (``cudaStreamWaitEvent``)."""
        _merge(self._after.setdefault(stream, {}), marks)

    def finish(self, marks: Marks) -> None:
        """Note that the host has waited for ``marks``."""
        _merge(self._done, marks)

    def finish_stream(self, stream: StreamKey) -> None:
        """Note that the host has waited for a stream (``cudaStreamSynchronize``)."""
        self.finish(self.mark(stream))

    def finish_device(self, device: int) -> None:
        """Note that the host has waited for all streams of a device (``cudaDeviceSynchronize``)."""
        known = {*self._after, *self._done}
        self.finish(self.mark(*(stream for stream in known if stream[0] == device)))

    def is_finished(self, stream: StreamKey, time: int) -> bool:
        """Return whether the host has seen ``stream`` pass ``time``."""
        return self._done.get(stream, 0) >= time

    def is_after(self, stream: StreamKey, marks: Marks) -> bool:
        """Return whether the next work of ``stream`` runs after all of ``marks``."""
        after = self._after.get(stream, {})
        return all(other == stream or after.get(other, 0) >= time for other, time in marks.items())

    def note(self, stream: StreamKey) -> None:
        """Remember that ``stream`` is in use, so that waiting for its device covers it."""
        self._after.setdefault(stream, {})


def _merge(into: Marks, marks: Marks) -> None:
    for stream, time in marks.items():
        if into.get(stream, 0) < time:
            into[stream] = time


_COMES_AFTER = {
    "alloc": "free_completed",
    "free_requested": "alloc",
    "free_completed": "free_requested",
}
"""Event of a block -> the event that must precede it at the same address."""


def check_history(trace: Sequence[Json], device: int) -> None:
    """Make sure that every block is allocated, freed and given back in turn.

    A history that was cut at its beginning, as ``max_entries`` does, is whole from there on. One
    that leaves out a kind of event (``skip_actions``), or that was paused, is not.

    Raises ``SnapshotError``: events are missing; the sentence names the first place.
    """
    last: dict[int, int] = {}
    for index, event in enumerate(trace):
        wanted = _COMES_AFTER.get(event["action"])
        if wanted is None:
            continue
        before = last.get(event["addr"])
        last[event["addr"]] = index
        if before is not None and trace[before]["action"] != wanted:
            raise SnapshotError(
                f"The history of device {device} has gaps: event {index} is {event['action']} of"
                f" the block at {event['addr']:#x}, so the last one before it there, event"
                f" {before}, must be {wanted}, and is {trace[before]['action']}. Only a recording"
                " of all actions, without a pause, can be replayed."
            )
