"""The pages that expandable segments held when a recording began.

Each map and unmap of the trace is undone from the end. Follows ``ExpandableSegment``,
``map_block``, ``unmap_block`` and ``release_expandable_segment`` of
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pytest_gpumem.allocator.blocks import SHARED_POOL, PoolId
from pytest_gpumem.allocator.constants import SMALL_SEGMENT
from pytest_gpumem.allocator.recording import Json
from pytest_gpumem.allocator.rounding import is_small, round_size
from pytest_gpumem.allocator.settings import AllocatorSettings

_OF_BLOCKS = frozenset({"alloc", "free_requested", "free_completed"})
PAGE = SMALL_SEGMENT
"""Bytes in which CUDA maps memory; pages of the large pool are several of these."""


class Owner(NamedTuple):
    """The owner of an expandable segment; each has at most one at a time, with enough addresses."""

    stream: int
    segment_type: str
    pool: PoolId


def mapped_at_start(
    segments: Iterable[Json], trace: Sequence[Json], settings: AllocatorSettings
) -> list[dict[str, Any]]:
    """Return expandable segments' mapped ranges before ``trace``, which ends with ``segments``.

    Each is a segment as a snapshot has it, without blocks, and with ``reserved_from``: the first
    address of its expandable segment, as far as the trace shows.
    """
    held = {
        page: Owner(
            segment["stream"],
            segment["segment_type"],
            _pair(segment.get("segment_pool_id", SHARED_POOL)),
        )
        for segment in segments
        if segment.get("is_expandable")
        for page in _pages(segment["address"], segment["total_size"])
    }
    changes = _changes(trace, held, settings)
    for mapped, owner, pages in reversed(changes):
        if mapped:
            for page in pages:
                held.pop(page, None)
        else:
            held.update(dict.fromkeys(pages, owner))
    bases = _bases(held, changes)
    return [
        {
            "address": first * PAGE,
            "total_size": count * PAGE,
            "stream": owner.stream,
            "segment_type": owner.segment_type,
            "segment_pool_id": owner.pool,
            "is_expandable": True,
            "reserved_from": bases[owner] * PAGE,
        }
        for owner, first, count in _runs(held)
    ]


_Change = tuple[bool, Owner, range]
"""Whether pages were mapped or unmapped, their owner, and the pages."""


def _changes(
    trace: Sequence[Json], held: dict[int, Owner], settings: AllocatorSettings
) -> list[_Change]:
    """Return the maps and unmaps of a trace; ``held`` has the pages at its end.

    Events do not contain the side of a pool for which they map. The allocation that needed the
    pages follows, or its failure. Unmapped pages held blocks before; where the trace has none of
    them, their size shows the side: the large side unmaps whole pages of its own.
    """
    divisions = settings.roundup_power2_divisions
    if not held and not any(event["action"] == "segment_unmap" for event in trace):
        return []
    sides: dict[int, str] = {}
    found: list[_Change] = []
    waiting: list[tuple[Json, range]] = []
    for event in trace:
        action, size = event["action"], event["size"]
        if action in _OF_BLOCKS or action == "oom":
            kind = "small" if is_small(round_size(size, divisions)) else "large"
            if action != "oom":
                sides[event["addr"] // PAGE] = kind
            for mapping, pages in waiting:
                sides.update(dict.fromkeys(pages, kind))
                found.append((True, _owner(mapping, kind, held.get(pages.start)), pages))
            waiting.clear()
        elif action == "segment_map":
            waiting.append((event, _pages(event["addr"], size)))
        elif action == "segment_unmap":
            pages = _pages(event["addr"], size)
            by_size = "small" if size % settings.large_segment_size else "large"
            kind = next((sides[page] for page in pages if page in sides), by_size)
            found.append((False, _owner(event, kind, held.get(pages.start)), pages))
    found += [(True, held[pages.start], pages) for _, pages in waiting if pages.start in held]
    return found


def _owner(event: Json, kind: str, last: Owner | None) -> Owner:
    """Return the owner by an event; before 2.12 only the segments at the end contain the pool."""
    pool = SHARED_POOL if last is None else last.pool
    return Owner(event["stream"], kind, _pair(event.get("pool_id", pool)))


def _bases(held: dict[int, Owner], changes: Sequence[_Change]) -> dict[Owner, int]:
    """Return the lowest page that each segment held at the start has, then or later.

    A segment without mapped pages is abandoned: later pages belong to another one.
    """
    bases: dict[Owner, int] = {}
    count: dict[Owner, int] = {}
    for page, owner in held.items():
        bases[owner] = min(page, bases.get(owner, page))
        count[owner] = count.get(owner, 0) + 1
    for mapped, owner, pages in changes:
        if count.get(owner, 0) > 0:
            count[owner] += len(pages) if mapped else -len(pages)
            bases[owner] = min(pages.start, bases[owner])
    return bases


def _runs(held: dict[int, Owner]) -> Iterator[tuple[Owner, int, int]]:
    """Return owner, first page and number of pages of every stretch without a gap."""
    numbered = enumerate(sorted(held))
    for (owner, _), stretch in groupby(numbered, lambda pair: (held[pair[1]], pair[1] - pair[0])):
        pages = [page for _, page in stretch]
        yield owner, pages[0], len(pages)


def _pages(address: int, size: int) -> range:
    return range(address // PAGE, (address + size) // PAGE)


def _pair(pool: Sequence[int]) -> PoolId:
    first, second = pool
    return first, second
