"""Shared fixtures, whose blocks are placed as if the current test were the first of its process.

The addresses of a fixture's blocks depend on the fixtures set up before it, and so on the order of
tests; reserved bytes would, too. So after other tests have run, the blocks of a test's fixtures are
freed and allocated again in the order in which the test requests the fixtures: the allocations and
frees of each set-up are repeated, and its storages get the new addresses. Pointers that a program
has read before refer to the old addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pytest_gpumem.dry.blocks import BlockNumbers, Blocks, LeftoverBlocks
from pytest_gpumem.dry.load import function
from pytest_gpumem.measurement.fixtures import Renewed
from pytest_gpumem.measurement.statistics import Bytes

KeepValues = Callable[[Sequence[int]], Callable[[Mapping[int, torch.Tensor]], None]]
"""Function called with the addresses of blocks that will move. It returns a function to be called
after the move with the moved tensors by their old addresses."""


class Fixtures:
    """The placement of the fixtures of one test after the other."""

    def __init__(self, blocks: Blocks, leftover: LeftoverBlocks, keep_values: KeepValues) -> None:
        self._blocks = blocks
        self._leftover = leftover
        self._keep_values = keep_values
        self._log = _Log()
        # Torch's own functions: while a test runs they are replaced.
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
        """Begin a test that requests ``fixtures`` in this order; some are set up already."""
        self._renewed = renewed
        self._expected = [one for one in fixtures if one in self._spans or not is_there(one)]
        first = self._pop_ready()
        if first and first == self._placed and self._have_own_segments(first):
            self._fill(first)
        else:
            self._place([], first)

    def begin_body(self) -> None:
        """Place the fixtures that come after one that the test did not use."""
        self._expected = [one for one in self._expected if one in self._spans]
        following = self._pop_ready()
        if following:
            self._place(self._placed, following)

    @contextmanager
    def setting_up(self, fixture: object) -> Iterator[None]:
        """Record the blocks allocated inside as those of the set-up of ``fixture``."""
        first = self._blocks.last
        self._depth += 1
        try:
            with self._log.kept(lambda events: self._record(fixture, events)):
                yield
        finally:
            self._depth -= 1
        self._spans[fixture] = first, self._blocks.last
        if fixture in self._expected:
            self._expected.remove(fixture)
        if fixture in self._set_ups:
            self._placed.append(fixture)
        following = [] if self._depth else self._pop_ready()
        if following:
            self._place(self._placed, following)

    def forget(self, fixture: object) -> None:
        """Drop a fixture that has been torn down."""
        self._spans.pop(fixture, None)
        self._set_ups.pop(fixture, None)
        if fixture in self._placed:
            self._placed.remove(fixture)

    def _record(self, fixture: object, events: Sequence[_Event]) -> None:
        left = {at: (start, self._blocks.number(start)) for at, start in _left(events).items()}
        if left:
            self._set_ups[fixture] = _SetUp(events, left)

    def _pop_ready(self) -> list[object]:
        """Remove and return the expected fixtures before the first that is not set up yet."""
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
        """Place ``fixtures`` after those in ``before``."""
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
            self._repeat_set_up(one, moved)
        done({each.before: each.tensor for each in moved.values()})

    def _tensors_of(self, fixtures: Sequence[object]) -> Mapping[int, torch.Tensor] | None:
        """Return a tensor for each live block of ``fixtures``, by the block's number.

        ``None`` if a block cannot be moved: only C++ holds it, or it is from the pool of a graph or
        of a side stream.
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

    def _repeat_set_up(self, fixture: object, moved: Mapping[int, _Moved]) -> None:
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
    """The allocation of a block, or its free, with a negative size."""

    start: int
    size: int
    device: int


@dataclass
class _SetUp:
    """The set-up of one fixture."""

    events: Sequence[_Event]
    left: Mapping[int, tuple[int, int]]
    """Address and number of each block that was not freed, by the position of its allocation."""


class _Log:
    """The runtime's log of blocks (``source/allocations.c``)."""

    def __init__(self) -> None:
        self._log = function("log")
        self._logged = function("logged", ctypes.c_void_p, ctypes.c_size_t, gives=ctypes.c_size_t)
        self._nested: list[list[BlockNumbers]] = []

    @contextmanager
    def kept(self, take: Callable[[Sequence[_Event]], None]) -> Iterator[None]:
        """Call ``take`` with the events inside, without those of a nested call of this."""
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
    """Return the addresses of blocks that are not freed, by the position of their allocation."""
    left: dict[int, int] = {}
    for at, event in enumerate(events):
        if event.size > 0:
            left[event.start] = at
        else:
            left.pop(event.start, None)
    return {at: start for start, at in left.items()}


class _Moved:
    """A storage whose memory has been freed, to be allocated again with its known values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._storage = tensor.untyped_storage()
        self.before = start = self._storage.data_ptr()
        self._size = self._storage.nbytes()
        place = ctypes.c_void_p, ctypes.c_size_t
        written = function("written", *place, *place, gives=ctypes.c_size_t)
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
        """Allocate memory again, and write the values to it; return its address."""
        self._storage.resize_(self._size)
        start = self._storage.data_ptr()
        know = function("know", ctypes.c_void_p, ctypes.c_size_t)
        for offset, values in self._values.items():
            ctypes.memmove(start + offset, values, len(values))
            know(start + offset, len(values))
        return start


def _repeat(events: Sequence[_Event], moved: Mapping[int, _Moved]) -> Mapping[int, int]:
    """Repeat ``events``; return the addresses of the blocks that are not freed, by position.

    ``moved`` are the storages for such blocks, by position. Other blocks are freed at the end.
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
