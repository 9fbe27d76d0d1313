"""The use of shared devices by a run's tests: durations, memory, and how good their order was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pytest_gpumem.sharing.ledger import Stay
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import counted

BARS = "▁▂▃▄▅▆▇█"
REPORTED_FROM = 0.5
"""Seconds of waiting for memory from which on they are reported."""
COLUMNS = 60
"""Width of the bar chart of a device's use over time."""


@dataclass(frozen=True)
class RunUsage:
    """The tests of one run on one device."""

    device: str
    capacity: int
    spans: tuple[Stay, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first test that was admitted to the end of the last."""
        return max(one.released for one in self.spans) - self._begin

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len({one.worker for one in self.spans})

    @property
    def bound(self) -> float:
        """The lower bound in seconds for any order of these tests on this device.

        The largest of: the longest test; all seconds divided by the workers; all seconds times
        bytes divided by the capacity.
        """
        seconds = sum(one.duration for one in self.spans)
        area = sum(one.duration * one.bytes for one in self.spans)
        longest = max(one.duration for one in self.spans)
        return max(longest, seconds / self.workers, area / self.capacity)

    @property
    def peak(self) -> int:
        """The most bytes that were granted at one moment."""
        return max(self._levels()[1], default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: seconds since the first test was admitted, and bytes."""
        begin = self._begin
        return {
            "device": self.device,
            "capacity": self.capacity,
            "spans": [
                {
                    "nodeid": one.nodeid,
                    "worker": one.worker,
                    "begin": round(one.granted - begin, 3),
                    "end": round(one.released - begin, 3),
                    "bytes": one.bytes,
                }
                for one in sorted(self.spans, key=lambda one: (one.granted, one.nodeid))
            ],
        }

    def picture(self, columns: int = COLUMNS) -> str:
        """Return a bar chart of the mean use in ``columns`` equal parts of the time."""
        times, levels = self._levels()
        width = self.makespan / columns or 1.0
        bars = ""
        for column in range(columns):
            start = self._begin + column * width
            end = start + width
            area = sum(
                level * max(min(until, end) - max(since, start), 0.0)
                for since, until, level in zip(times, [*times[1:], end], levels, strict=True)
            )
            share = area / width / self.capacity
            bars += BARS[min(int(share * len(BARS)), len(BARS) - 1)] if share > 0 else " "
        return bars

    @property
    def _begin(self) -> float:
        return min(one.granted for one in self.spans)

    def _levels(self) -> tuple[list[float], list[int]]:
        """Return the times at which the granted bytes changed, and the bytes from then on."""
        changes = sorted(
            [(one.released, -one.bytes) for one in self.spans]
            + [(one.granted, one.bytes) for one in self.spans]
        )
        return [time for time, _ in changes], list(accumulate(change for _, change in changes))


def usages(stays: Iterable[Stay], run: str, capacity: int) -> list[RunUsage]:
    """Return the use of each device by the tests of ``run``, of their ``stays``."""
    spans: dict[str, list[Stay]] = {}
    for stay in stays:
        if stay.run == run:
            spans.setdefault(stay.device, []).append(stay)
    return [RunUsage(device, capacity, tuple(found)) for device, found in sorted(spans.items())]


def lines(found: Sequence[RunUsage]) -> list[str]:
    """Return the use of each device as lines for the user."""
    text = []
    for usage in found:
        ratio = usage.makespan / usage.bound if usage.bound else 1.0
        text.append(
            f"{usage.device}: {counted(len(usage.spans), 'test')} on "
            f"{counted(usage.workers, 'worker')} in {usage.makespan:.1f} s, {ratio:.2f} x the "
            f"{usage.bound:.1f} s that no order can beat"
        )
        text.append(f"  use over time  {usage.picture()}")
    return text


def waits(tests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines on how tests came to their devices: records' ``sharing`` by id."""
    waited = {nodeid: one["waited"] for nodeid, one in tests.items()}
    waited = {nodeid: seconds for nodeid, seconds in waited.items() if seconds >= REPORTED_FROM}
    text = []
    if waited:
        longest = max(waited, key=waited.__getitem__)
        text.append(
            f"{counted(len(waited), 'test')} waited {sum(waited.values()):.1f} s in all for memory"
            f"; longest {longest}, {waited[longest]:.1f} s: "
            f"{tests[longest]['waited_for'] or 'for its turn'}"
        )
    for nodeid, one in tests.items():
        text += [
            f"{nodeid} was {note}" if note.startswith("run") else f"{nodeid} {note}"
            for note in one["notes"]
        ]
        if one["borrowed"]:
            text.append(f"{nodeid} borrowed {format_size(one['borrowed'])} above its quota")
    return text
