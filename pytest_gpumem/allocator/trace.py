"""The allocator's events, in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, overload

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
        self._changes: list[int] = []
        """Positions at which :attr:`recording` changed ..."""
        self._recordings: list[Recording] = []
        """... and the new values."""

    @property
    def recording(self) -> Recording | None:
        """The recording in effect; ``None`` before the first request."""
        return self._recordings[-1] if self._recordings else None

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
        if any(each.skipped for each in self._recordings):
            entries = [(at, each) for at, each in entries if not self._is_skipped(at, each)]
        most = recording.max_entries
        return entries if most is None else entries[-max(most, 1) :]

    def recorded(self, index: int) -> Recording | None:
        """Return the recording in effect when event ``index`` happened."""
        position = bisect_right(self._changes, index)
        return self._recordings[position - 1] if position else None

    def record(self, recording: Recording, *, clear: bool = False) -> None:
        """Apply ``torch.cuda.memory._record_memory_history`` to snapshots.

        Source: ``recordHistory`` in c10/cuda/CUDACachingAllocator.cpp; ending clears, too.
        """
        before = self.recording
        if clear or before is None or recording.on != before.on:
            self._shown_from = len(self)
        self._changes.append(len(self))
        self._recordings.append(recording)

    def _is_skipped(self, index: int, entry: TraceEntry) -> bool:
        recording = self.recorded(index)
        return recording is not None and entry.action in recording.skipped

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
        self._changes = [0 for _ in self._changes]

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
