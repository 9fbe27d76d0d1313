"""The free space in segments that earlier tests have left, filled while another test runs.

A test's numbers must not depend on earlier tests. A block that none of its fixtures holds, such as
a tensor in the traceback of a failed test, keeps its segment reserved. If the test's blocks were
placed in the free parts of that segment, it would reserve less than in a new process, and larger
blocks might be split in other ways. So those parts are filled, and the test gets new segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_MOST_IN_SMALL = 1 << 20
"""Bytes of the largest block in a segment of small ones (``kSmallSize`` of
c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.15)."""
_MOST_TRIES = 100
"""The most allocations from fixtures' segments, for one part, before it is left unfilled."""
_MOST_ROUNDS = 100
"""Rounds of filling: an allocation for one part may split another, which the next round fills."""


class _Hole(NamedTuple):
    """A free part of a segment."""

    start: int
    size: int
    most: int
    """Bytes of the largest block that the allocator takes from it."""
    device: int
    stream: int


class LeftoverSpace:
    """The free parts of segments in which no block belongs to the present test."""

    def __init__(self) -> None:
        self._filled: dict[int, tuple[int, int]] = {}
        """Device and bytes of each filler block, by address."""

    @property
    def filled(self) -> Mapping[int, int]:
        """The bytes that are filled now, by device."""
        sizes: Counter[int] = Counter()
        for device, size in self._filled.values():
            sizes[device] += size
        return sizes

    def fill(self, is_own: Callable[[int], bool], most: int | None = None) -> set[int]:
        """Fill the space until :meth:`empty`; return the addresses of blocks of other tests.

        ``is_own`` returns whether the block at an address belongs to the test. If the space is more
        than ``most`` bytes it is not filled: the test may need it.
        """
        others: set[int] = set()
        if not torch.cuda.is_initialized():
            return others
        elsewhere: list[int] = []
        grew = False
        for _ in range(_MOST_ROUNDS):
            holes, others, segments = self._holes(is_own)
            if not holes or (most is not None and sum(hole.size for hole in holes) > most):
                break
            for hole in holes:
                grew |= self._fill(hole, holes, segments, elsewhere)
        for address in elsewhere:
            torch.cuda.caching_allocator_delete(address)
        if elsewhere or grew:
            torch.cuda.empty_cache()
        return others

    def empty(self) -> None:
        """Free the filled space."""
        while self._filled:
            address, _ = self._filled.popitem()
            torch.cuda.caching_allocator_delete(address)

    def _holes(
        self, is_own: Callable[[int], bool]
    ) -> tuple[Sequence[_Hole], set[int], Sequence[tuple[int, int]]]:
        """Return the free parts of segments without a block of the test, the smallest first.

        Also returns the addresses of other blocks, and start and end of every segment.
        """
        holes: list[_Hole] = []
        others: set[int] = set()
        segments: list[tuple[int, int]] = []
        for segment in torch.cuda.memory_snapshot():
            segments.append((segment["address"], segment["address"] + segment["total_size"]))
            used = [each["address"] for each in segment["blocks"] if each["state"] != "inactive"]
            found = {one for one in used if one not in self._filled}
            own = set(filter(is_own, found))
            others |= found - own
            if used and not own:
                holes += _holes_of(segment)
        return sorted(holes, key=lambda hole: hole.size), others, segments

    def _fill(
        self,
        hole: _Hole,
        holes: Sequence[_Hole],
        segments: Sequence[tuple[int, int]],
        elsewhere: list[int],
    ) -> bool:
        """Allocate the bytes of ``hole`` from ``holes``; append other addresses to ``elsewhere``.

        Returns ``True`` if the allocator made a new segment, because blocks for other holes have
        used this one up.
        """
        left = hole.size
        tries = 0
        while left and tries < _MOST_TRIES:
            size = min(left, hole.most)
            try:
                address = torch.cuda.caching_allocator_alloc(size, hole.device, hole.stream)
            except torch.OutOfMemoryError:
                return False  # neither such a part nor room for a segment
            if any(one.start <= address < one.start + one.size for one in holes):
                self._filled[address] = hole.device, size
                left -= size
                continue
            if not any(start <= address < end for start, end in segments):
                torch.cuda.caching_allocator_delete(address)
                return True
            # The allocator uses the smallest free part that fits, even in a fixture's segment.
            elsewhere.append(address)
            tries += 1
        return False


def _holes_of(segment: Mapping[str, Any]) -> Iterator[_Hole]:
    """Yield the free parts of ``segment``, unless it belongs to the pool of a CUDA graph."""
    if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
        return
    is_small = segment["segment_type"] == "small"
    for block in segment["blocks"]:
        if block["state"] == "inactive" and (is_small or block["size"] > _MOST_IN_SMALL):
            most = _MOST_IN_SMALL if is_small else block["size"]
            place = segment["device"], segment["stream"]
            yield _Hole(block["address"], block["size"], most, *place)
