"""The allocator's events, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

FREE = "free"
"""Recorded for a free that completes at once: it reads as two events, requested and completed."""

RawEntry = tuple[str, int, int, int, Any]
"""action, address, size, stream, context.

The allocator appends these five to one flat list: keeping a tuple per event would cost more than
all else that it does for the event.
"""


class TraceEntry(NamedTuple):
    """One event, as in ``torch.cuda.memory._snapshot()["device_traces"]``.

    ``size`` is what was requested for ``alloc``, ``free_requested`` and ``free_completed``, the
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
        """The private pool that the memory belongs to; (0, 0) for the one that all share."""
        pool_id: tuple[int, int] = getattr(self.stream, "pool_id", (0, 0))
        return pool_id


class Trace(Sequence[TraceEntry]):
    """A view of the recorded events; it follows the allocator while more are recorded."""

    def __init__(self, raw: list[Any]) -> None:
        self._raw = raw
        self._read = 0
        self._entries: list[TraceEntry] = []
        self._shown_from = 0
        self._recording = False
        self.with_cpp = False
        """Whether snapshots show C++ frames in front of Python's."""

    @property
    def shown(self) -> Sequence[TraceEntry]:
        """What a snapshot shows: as in torch, nothing from before recording began.

        Until somebody calls ``_record_memory_history`` everything is shown.
        """
        return self[self._shown_from :]

    def record(self, on: bool, *, clear: bool = False, with_cpp: bool = False) -> None:
        """Do to snapshots what ``torch.cuda.memory._record_memory_history`` does.

        Source: ``recordHistory`` in c10/cuda/CUDACachingAllocator.cpp; ending clears, too.
        """
        if clear or on != self._recording:
            self._shown_from = len(self)
        self._recording, self.with_cpp = on, on and with_cpp

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
        """How many events :meth:`raw` would yield from the beginning."""
        return len(self._raw) // 5

    def raw(self, position: int) -> Iterator[RawEntry]:
        """Yield the events from ``position`` on as they were recorded, :data:`FREE` as one."""
        items = iter(self._raw[position * 5 :])
        return zip(*[items] * 5, strict=True)

    def clear(self) -> None:
        """Forget the events so far."""
        self._raw.clear()
        self._entries.clear()
        self._read = self._shown_from = 0

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
