"""The progress of streams, as far as the host can infer it.

A GPU runs the work of a stream in order and of different streams in no order, later than the host
issues it; how much later is not modelled. So work counts as finished once the host has waited
for it: for its stream, for its device, or for a stream or event that comes after it.
"""

from __future__ import annotations

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
