"""The time that ``torch.cuda._sleep`` keeps a stream busy; nothing else takes any.

The host's clock says how late it is. Where the host waits for a sleeping stream no time is lost:
from then on it counts as so much later.
"""

from __future__ import annotations

import time

from pytest_gpumem.allocator.timeline import StreamKey

CYCLES_PER_SECOND = 1e9
"""Of the GPU's clock, which is not simulated: a round number near those of the catalogue's GPUs."""


class Clock:
    """Until when each stream sleeps, in seconds on a clock of its own."""

    def __init__(self) -> None:
        self._ends: dict[StreamKey, float] = {}
        self._skipped = 0.0

    @property
    def is_running(self) -> bool:
        """Whether any stream ever slept."""
        return bool(self._ends)

    @property
    def now(self) -> float:
        """How late it is."""
        return time.perf_counter() + self._skipped

    def sleep(self, stream: StreamKey, cycles: int) -> None:
        """Let a stream sleep once its work so far is done."""
        self._ends[stream] = self.end(stream) + cycles / CYCLES_PER_SECOND

    def end(self, stream: StreamKey) -> float:
        """When the work of a stream is done: now, or when it wakes up."""
        return max(self.now, self._ends.get(stream, 0.0))

    def delay(self, stream: StreamKey, moment: float) -> None:
        """Let later work of a stream come after ``moment``."""
        if not self.is_over(moment):
            self._ends[stream] = max(self.end(stream), moment)

    def is_over(self, moment: float) -> bool:
        """Whether ``moment`` has passed."""
        return moment <= self.now

    def wait_for(self, moment: float) -> None:
        """The host waits for ``moment``."""
        self._skipped += max(0.0, moment - self.now)

    def wait_for_device(self, device: int) -> None:
        """The host waits for every stream of a device."""
        for stream, moment in self._ends.items():
            if stream[0] == device:
                self.wait_for(moment)
