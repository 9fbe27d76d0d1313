"""Fixtures that tests share, placed as in a process in which the present test is the first.

A fixture lies beside what was set up before it, which is another fixture in another order of tests;
so reserved bytes would depend on that order. Where other tests have come in between, the blocks of
a test's fixtures are given back and taken again, in the order in which it asks for them: what a
set-up took and gave back is repeated, and its tensors keep their storages, whose memory is then
elsewhere. Pointers that a program has read before are those of the old place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pytest_gpumem.dry.blocks import BlockNumbers, Blocks, LeftoverBlocks
from pytest_gpumem.measurement.fixtures import Renewed
from pytest_gpumem.measurement.statistics import Bytes

KeepValues = Callable[[Sequence[int]], Callable[[Mapping[int, torch.Tensor]], None]]
"""A function of the addresses of blocks that are given back, which returns a function of the
tensors that have others since, by their old addresses."""


class Fixtures:
    """The fixtures of the tests, one test after the other."""

    def __init__(self, blocks: Blocks, leftover: LeftoverBlocks, keep_values: KeepValues) -> None:
        self._blocks = blocks
        self._leftover = leftover
        self._keep_values = keep_values
        self._log = _Log()
        # The body of a test gets others in their place.
        self._stats: Callable[[int], dict[str, Any]] = torch._C._cuda_memoryStats
        self._reset_peaks: Callable[[int], None] = torch._C._cuda_resetPeakMemoryStats
        self._spans: dict[object, BlockNumbers] = {}
        """Blocks of a fixture's set-up, by fixture."""
        self._set_ups: dict[object, _SetUp] = {}
        self._depth = 0
        self._renewed: Renewed = lambda *_: None
        self._expected: list[object] = []
        """The fixtures of the test that are not in their places yet, in order."""
        self._placed: list[object] = []
        """The fixtures that are in their places, with blocks."""

    def begin(
        self, fixtures: Sequence[object], is_there: Callable[[object], bool], renewed: Renewed
    ) -> None:
        """Begin a test that has ``fixtures`` in this order, of which some are there already."""
        self._renewed = renewed
        self._expected = [one for one in fixtures if one in self._spans or not is_there(one)]
        first = self._next()
        if first and first == self._placed and self._have_own_segments(first):
            self._fill(first)
        else:
            self._place([], first)

    def begin_body(self) -> None:
        """Place the fixtures that follow one which the test turned out not to use."""
        self._expected = [one for one in self._expected if one in self._spans]
        following = self._next()
        if following:
            self._place(self._placed, following)

    @contextmanager
    def setting_up(self, fixture: object) -> Iterator[None]:
        """Record the blocks allocated inside as those of the set-up of ``fixture``."""
        first = self._blocks.last
        self._depth += 1
        try:
            with self._log.kept(lambda events: self._take(fixture, events)):
                yield
        finally:
            self._depth -= 1
        self._spans[fixture] = first, self._blocks.last
        if fixture in self._expected:
            self._expected.remove(fixture)
        if fixture in self._set_ups:
            self._placed.append(fixture)
        following = [] if self._depth else self._next()
        if following:
            self._place(self._placed, following)

    def forget(self, fixture: object) -> None:
        """Drop a fixture that has been torn down."""
        self._spans.pop(fixture, None)
        self._set_ups.pop(fixture, None)
        if fixture in self._placed:
            self._placed.remove(fixture)

    def _take(self, fixture: object, events: Sequence[_Event]) -> None:
        left = {at: (start, self._blocks.number(start)) for at, start in _left(events).items()}
        if left:
            self._set_ups[fixture] = _SetUp(events, left)

    def _next(self) -> list[object]:
        """Return the expected fixtures that are there, up to one that is not; expect the others."""
        found: list[object] = []
        while self._expected and self._expected[0] in self._spans:
            found.append(self._expected.pop(0))
        return [one for one in found if one in self._set_ups]

    def _fill(self, fixtures: Sequence[object]) -> None:
        self._leftover.fill_beside([self._spans[one] for one in fixtures])

    def _have_own_segments(self, fixtures: Sequence[object]) -> bool:
        """Return whether no other block lies in the segments of ``fixtures``."""
        numbers = {number for one in fixtures for _, number in self._set_ups[one].left.values()}
        for segment in torch.cuda.memory_snapshot():
            used = {
                self._blocks.number(block["address"])
                for block in segment["blocks"]
                if block["state"] != "inactive"
            }
            if used & numbers and not used <= numbers:
                return False
        return True

    def _place(self, before: Sequence[object], fixtures: Sequence[object]) -> None:
        """Place ``fixtures`` behind those ``before``."""
        self._placed = [*before, *fixtures]
        tensors = self._tensors_of(fixtures) if fixtures else None
        if tensors is None:
            self._fill(self._placed)
            return
        done = self._keep_values([each.data_ptr() for each in tensors.values()])
        moved = {number: _Moved(tensor) for number, tensor in tensors.items()}
        self._leftover.empty()
        torch.cuda.empty_cache()
        self._fill(before)
        for one in fixtures:
            self._again(one, moved)
        done({each.before: each.tensor for each in moved.values()})

    def _tensors_of(self, fixtures: Sequence[object]) -> Mapping[int, torch.Tensor] | None:
        """Return a tensor of each block of ``fixtures`` that is still there, by its number.

        ``None`` where one cannot be moved: only C++ holds it, or it is a graph's or a stream's own.
        """
        left = [place for one in fixtures for place in self._set_ups[one].left.values()]
        numbers = {number for start, number in left if self._blocks.number(start) == number}
        movable = {
            self._blocks.number(block["address"])
            for segment in torch.cuda.memory_snapshot()
            if segment["stream"] == 0 and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
            for block in segment["blocks"]
        }
        found = self._leftover.whole_tensors(numbers)
        return found if numbers <= movable and numbers == found.keys() else None

    def _again(self, fixture: object, moved: Mapping[int, _Moved]) -> None:
        set_up = self._set_ups[fixture]
        first, before = self._blocks.last, self._read("current")
        for device in before:
            self._reset_peaks(device)
        there = {at: moved[number] for at, (_, number) in set_up.left.items() if number in moved}
        numbers = {at: number for at, (_, number) in set_up.left.items()}
        starts = _repeat(set_up.events, there)
        set_up.left = {at: (start, self._blocks.number(start)) for at, start in starts.items()}
        for at, (_, number) in set_up.left.items():
            self._leftover.moved(numbers[at], number)
        self._spans[fixture] = first, self._blocks.last
        held = {i: now - before[i] for i, now in self._read("current").items()}
        self._renewed(fixture, held, {i: now - before[i] for i, now in self._read("peak").items()})

    def _read(self, which: str) -> Mapping[int, Bytes]:
        every = {device: self._stats(device) for device in range(torch.cuda.device_count())}
        names = ("allocated_bytes", "reserved_bytes")
        return {
            device: Bytes(*(stats[name]["all"][which] for name in names))
            for device, stats in every.items()
        }


class _Event(NamedTuple):
    """A block that was handed out; with a negative size one that was taken back."""

    start: int
    size: int
    device: int


@dataclass
class _SetUp:
    """The set-up of one fixture."""

    events: Sequence[_Event]
    left: Mapping[int, tuple[int, int]]
    """Address and number of each block that it has left, by the position of its event."""


class _Log:
    """The runtime's log of blocks (``source/allocations.c``)."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._log = library.pytest_gpumem_dry_log
        self._logged = library.pytest_gpumem_dry_logged
        self._logged.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._logged.restype = ctypes.c_size_t
        self._nested: list[list[BlockNumbers]] = []

    @contextmanager
    def kept(self, take: Callable[[Sequence[_Event]], None]) -> Iterator[None]:
        """Give ``take`` the events inside, except those inside a nested such context."""
        self._log(1)
        begin = self._logged(None, 0)
        self._nested.append([])
        try:
            yield
        finally:
            events = self._since(begin)
            nested = self._nested.pop()
            if self._nested:
                self._nested[-1].append((begin, begin + len(events)))
            self._log(0)
            own = [
                event
                for at, event in enumerate(events, begin)
                if not any(first <= at < end for first, end in nested)
            ]
            take(own)

    def _since(self, begin: int) -> Sequence[_Event]:
        count = self._logged(None, 0) - begin
        numbers = (ctypes.c_int64 * (3 * count))()
        self._logged(numbers, begin)
        return [_Event(*numbers[at : at + 3]) for at in range(0, 3 * count, 3)]


def _left(events: Sequence[_Event]) -> Mapping[int, int]:
    """Return the addresses of the blocks that ``events`` leave, by their positions in these."""
    left: dict[int, int] = {}
    for at, event in enumerate(events):
        if event.size > 0:
            left[event.start] = at
        else:
            left.pop(event.start, None)
    return {at: start for start, at in left.items()}


class _Moved:
    """A storage whose memory has been given back, to be taken again with its known values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._storage = tensor.untyped_storage()
        self.before = start = self._storage.data_ptr()
        self._size = self._storage.nbytes()
        written = ctypes.CDLL(None).pytest_gpumem_dry_written
        written.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
        written.restype = ctypes.c_size_t
        count = written(start, self._size, None, 0)
        parts = (ctypes.c_int64 * (2 * count))()
        written(start, self._size, parts, count)
        self._values = {
            parts[at]: ctypes.string_at(start + parts[at], parts[at + 1])
            for at in range(0, 2 * count, 2)
        }
        """The known values by their offsets."""
        self._storage.resize_(0)

    def take(self) -> int:
        """Take memory again, and write the values to it; return its address."""
        self._storage.resize_(self._size)
        start = self._storage.data_ptr()
        know = ctypes.CDLL(None).pytest_gpumem_dry_know
        know.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        for offset, values in self._values.items():
            ctypes.memmove(start + offset, values, len(values))
            know(start + offset, len(values))
        return start


def _repeat(events: Sequence[_Event], moved: Mapping[int, _Moved]) -> Mapping[int, int]:
    """Repeat ``events``; return the addresses of what they leave, by position.

    ``moved`` are the storages of such blocks, by position. Other blocks are given back at the end.
    """
    others: dict[int, int] = {}
    taken: dict[int, int] = {}
    for at, event in enumerate(events):
        if event.size < 0:
            if event.start in others:
                torch.cuda.caching_allocator_delete(others.pop(event.start))
        elif at in moved:
            taken[at] = moved[at].take()
        else:
            with torch.cuda.device(event.device):
                others[event.start] = torch.cuda.caching_allocator_alloc(event.size)
    for address in others.values():
        torch.cuda.caching_allocator_delete(address)
    torch.cuda.empty_cache()
    return taken
