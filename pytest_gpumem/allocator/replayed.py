"""The result of a replay: whether it was exact, and how much memory it took."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pytest_gpumem.allocator.recording import Json, line_of
from pytest_gpumem.allocator.releases import Version
from pytest_gpumem.allocator.trace import FREE, Trace

START = -1
"""Index of the moment before the first event."""


@dataclass
class Course:
    """The course of a run: allocated, reserved and split bytes at its start, then their changes."""

    trace: Sequence[Json]
    start: Sequence[Json]
    """The segments before the first event."""
    now: tuple[int, int, int] = (0, 0, 0)
    """The bytes after the latest event."""
    allocated: array[int] = field(default_factory=partial(array, "q"))
    reserved: array[int] = field(default_factory=partial(array, "q"))
    split: array[int] = field(default_factory=partial(array, "q"))
    fullest: int = START
    """The event with the highest reserved memory, and of several that with the most allocated."""
    then: Sequence[Json] = ()
    """The segments after that event."""
    end: Sequence[Json] = ()

    def note(self, allocated: int, reserved: int, split: int) -> None:
        """Record the bytes at the start, or after the next event."""
        self.allocated.append(allocated - self.now[0])
        self.reserved.append(reserved - self.now[1])
        self.split.append(split - self.now[2])
        self.now = allocated, reserved, split


@dataclass(frozen=True)
class Mismatch:
    """The first place where a recording and its replay differ."""

    event: int | None
    """Index in the device's trace; ``None`` for a difference at the end."""
    expected: str
    got: str
    line: str = ""
    """``file:line, function`` of the event, where the recording has it."""

    def __str__(self) -> str:
        if self.event is None:
            return f"{self.expected}, {self.got}"
        at = f" ({self.line})" if self.line else ""
        return f"event {self.event} is {self.expected}, simulated {self.got}{at}"


@dataclass(frozen=True)
class Shortage:
    """An allocation that found no memory; sizes in bytes."""

    event: int
    """Index in the device's trace; :data:`START` for what was live when recording began."""
    requested: int
    """Bytes requested by the program; in a recording after rounding."""
    free: int
    """Left on the device."""
    line: str = ""
    """``file:line, function``, where the recording has it."""


@dataclass(frozen=True)
class Usage:
    """The memory use of one device; in bytes."""

    peak_allocated: int
    peak_reserved: int
    allocated_then: int
    """The most that was allocated while ``peak_reserved`` was reserved."""
    largest_split: int
    """The largest free part of a segment partly in use, at that moment."""
    segments: int
    """Segments held from the driver, at that moment."""
    retries: int
    """Times that the cache had to be emptied because the device was full; 0 for a recording, which
    does not contain it."""
    out_of_memory: Shortage | None = None
    """The first allocation that found no memory."""

    @property
    def fragmentation(self) -> int:
        """Reserved minus allocated bytes at the peak of reserved memory, with most allocated."""
        return self.peak_reserved - self.allocated_then


@dataclass(frozen=True)
class DeviceReplay:
    """The replay of one device of a snapshot."""

    device: int
    events: int
    exact: bool
    exact_addresses: int
    total: int
    mismatch: Mismatch | None
    recorded: Usage
    what_if: Usage | None
    capacity: int | None
    """Memory of the device in the ``what_if``; ``None`` if unknown."""
    live_at_start: int
    """Bytes that were allocated before recording began; for a ``what_if`` they are placed anew
    unless the recorded settings are kept."""
    courses: Sequence[Course] = ()
    """The runs with the recorded settings and with those tried, where they were asked for."""


@dataclass(frozen=True)
class ReplayResult:
    """The comparison of a simulated allocator with a recorded one; peaks in bytes.

    With several devices the counts are sums, and the peaks those of the device with the highest.
    """

    exact: bool
    """Every event has the recorded action, address and size, and the final segments are equal."""
    exact_addresses: int
    total: int
    """Recorded allocations."""
    first_mismatch: str | None
    peak_allocated: int
    """Peak with the requested settings and GPU, as is ``peak_reserved``."""
    peak_reserved: int
    devices: tuple[DeviceReplay, ...]
    recorded_conf: str
    alloc_conf: str | None
    """The settings tried instead of the recorded ones, ``None`` where these were kept."""
    gpu: str | None
    """The model tried, ``None`` for the recorded one, whose memory is not on record."""
    version: Version
    """The torch release whose rules were used."""

    @property
    def what_if(self) -> bool:
        """Whether other settings or another GPU were tried."""
        return self.alloc_conf is not None or self.gpu is not None

    @property
    def out_of_memory(self) -> Shortage | None:
        """The first allocation that would run out of memory with the settings or GPU tried."""
        usages = [each.what_if for each in self.devices if each.what_if is not None]
        return next((each.out_of_memory for each in usages if each.out_of_memory), None)


_NOT_COMPARED = frozenset({"free_requested", "snapshot", "oom", "annotate"})
"""free_requested repeats free_completed; the others do not change the allocator's state."""


def first_mismatch(recording: Sequence[Json], simulation: Trace) -> Mismatch | None:
    """Return where the two sequences of events first differ."""
    recorded = [
        (index, (event["action"], event["addr"], event["size"], event["stream"]))
        for index, event in enumerate(recording)
        if event["action"] not in _NOT_COMPARED
    ]
    simulated = [
        ("free_completed" if action is FREE else action, address, size, stream)
        for action, address, size, stream, _ in simulation.raw(0)
        if action not in _NOT_COMPARED
    ]
    for (index, expected), actual in zip(recorded, simulated, strict=False):
        if expected != actual:
            return Mismatch(index, _words(expected), _words(actual), line_of(recording[index]))
    if len(recorded) != len(simulated):
        return Mismatch(None, f"{len(recorded)} events are recorded", f"{len(simulated)} simulated")
    return None


def layout_mismatch(recorded: Iterable[Json], simulated: Iterable[Json]) -> Mismatch | None:
    """Return the first difference between two layouts: segments, size and state of their blocks."""
    expected, actual = _layout(recorded), _layout(simulated)
    for address in sorted(expected.keys() | actual.keys()):
        if expected.get(address) != actual.get(address):
            return Mismatch(
                None,
                f"the final block at {address:#x} is {expected.get(address)}",
                f"simulated {actual.get(address)}",
            )
    return None


def _words(event: tuple[str, int, int, int]) -> str:
    action, address, size, stream = event
    return f"{action} of {size} B at {address:#x} on stream {stream}"


def _layout(segments: Iterable[Json]) -> dict[int, tuple[int, str, int]]:
    """Return, by address of a block, its size, its state and its segment."""
    layout = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            layout[address] = (block["size"], block["state"], segment["address"])
            address += block["size"]
    return layout
