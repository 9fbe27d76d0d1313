"""Set-ups of fixtures that tests share, repeated in the memory of a later test.

What a set-up took and gave back is repeated, and its tensors keep their storages, whose memory is
then elsewhere. Pointers that a program has read before are those of the old place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

BlockNumbers = tuple[int, int]


class BlockEvent(NamedTuple):
    """A block that was handed out; with a negative size one that was taken back."""

    start: int
    size: int
    device: int


@dataclass
class SetUp:
    """The set-up of one fixture."""

    events: Sequence[BlockEvent]
    left: Mapping[int, tuple[int, int]]
    """Address and number of each block that it has left, by the position of its event."""


class Log:
    """The runtime's log of blocks (``source/allocations.c``)."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._log = library.pytest_gpumem_dry_log
        self._logged = library.pytest_gpumem_dry_logged
        self._logged.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._logged.restype = ctypes.c_size_t
        self._nested: list[list[BlockNumbers]] = []

    @contextmanager
    def kept(self, take: Callable[[Sequence[BlockEvent]], None]) -> Iterator[None]:
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

    def _since(self, begin: int) -> Sequence[BlockEvent]:
        count = self._logged(None, 0) - begin
        numbers = (ctypes.c_int64 * (3 * count))()
        self._logged(numbers, begin)
        return [BlockEvent(*numbers[at : at + 3]) for at in range(0, 3 * count, 3)]


def blocks_left(events: Sequence[BlockEvent]) -> Mapping[int, int]:
    """Return the addresses of the blocks that ``events`` leave, by their positions in these."""
    left: dict[int, int] = {}
    for at, event in enumerate(events):
        if event.size > 0:
            left[event.start] = at
        else:
            left.pop(event.start, None)
    return {at: start for start, at in left.items()}


class Content:
    """The known values in a block, while its storage has none."""

    def __init__(self, start: int, size: int) -> None:
        written = ctypes.CDLL(None).pytest_gpumem_dry_written
        written.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
        written.restype = ctypes.c_size_t
        count = written(start, size, None, 0)
        parts = (ctypes.c_int64 * (2 * count))()
        written(start, size, parts, count)
        self._parts = {
            parts[at]: ctypes.string_at(start + parts[at], parts[at + 1])
            for at in range(0, 2 * count, 2)
        }

    def write(self, start: int) -> None:
        """Write the values to the block at ``start``."""
        know = ctypes.CDLL(None).pytest_gpumem_dry_know
        know.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        for offset, values in self._parts.items():
            ctypes.memmove(start + offset, values, len(values))
            know(start + offset, len(values))


class Moved:
    """A storage whose memory has been given back, to be taken again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._storage = tensor.untyped_storage()
        self.before = self._storage.data_ptr()
        self._size = self._storage.nbytes()
        self._content = Content(self.before, self._size)
        self._storage.resize_(0)

    def take(self) -> int:
        """Take memory again; return its address."""
        self._storage.resize_(self._size)
        start = self._storage.data_ptr()
        self._content.write(start)
        return start


def repeat(events: Sequence[BlockEvent], moved: Mapping[int, Moved]) -> Mapping[int, int]:
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
