"""The time that ``torch.cuda._sleep`` keeps a stream busy; nothing else takes any.

The host's clock gives the time. Waiting for a sleeping stream takes the host no time: the clock
is moved on instead.
"""

from __future__ import annotations

import time

from pytest_gpumem.allocator.timeline import StreamKey

CYCLES_PER_SECOND = 1e9
"""The GPU's clock, which is not simulated: a round number near those of the catalogue's GPUs."""


class Clock:
    """The times until which streams sleep, in seconds on a clock of their own."""

    def __init__(self) -> None:
        self._ends: dict[StreamKey, float] = {}
        self._skipped = 0.0

    @property
    def is_running(self) -> bool:
        """Whether any stream ever slept."""
        return bool(self._ends)

    @property
    def now(self) -> float:
        """The time in seconds, on this clock."""
        return time.perf_counter() + self._skipped

    def sleep(self, stream: StreamKey, cycles: int) -> None:
        """Keep a stream busy for ``cycles`` once its work so far is done."""
        self._ends[stream] = self.end(stream) + cycles / CYCLES_PER_SECOND

    def end(self, stream: StreamKey) -> float:
        """Return the time when the work of a stream is done: now, or when it wakes up."""
        return max(self.now, self._ends.get(stream, 0.0))

    def delay(self, stream: StreamKey, moment: float) -> None:
        """Delay later work of a stream until ``moment``."""
        if not self.is_over(moment):
            self._ends[stream] = max(self.end(stream), moment)

    def is_over(self, moment: float) -> bool:
        """Return whether ``moment`` has passed."""
        return moment <= self.now

    def wait_for(self, moment: float) -> None:
        """Make the host wait for ``moment``."""
        self._skipped += max(0.0, moment - self.now)

    def wait_for_device(self, device: int) -> None:
        """Make the host wait for every stream of a device."""
        for stream, moment in self._ends.items():
            if stream[0] == device:
                self.wait_for(moment)
