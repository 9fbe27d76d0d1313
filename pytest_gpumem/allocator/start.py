"""The state before a recording: its events are undone from the state in which it ended.

For the pages of expandable segments, each map and unmap is undone. Follows ``ExpandableSegment``,
``map_block``, ``unmap_block`` and ``release_expandable_segment`` of
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pytest_gpumem.allocator.blocks import (
    SHARED_POOL,
    SMALL_SEGMENT,
    SMALL_SIZE,
    PoolId,
    round_size,
)
from pytest_gpumem.allocator.recording import Json
from pytest_gpumem.allocator.settings import AllocatorSettings

_LIVE = "active_allocated"
PENDING = "active_pending_free"
"""Freed by the program, and still in use by a stream."""


def starting_segments(
    segments: Iterable[Json], trace: Sequence[Json], settings: AllocatorSettings
) -> list[dict[str, Any]]:
    """Return the segments at the beginning of ``trace``, which ends with ``segments``; by address.

    Each has ``address``, ``total_size``, ``stream``, ``segment_type``, ``segment_pool_id`` and
    ``blocks``, as in a snapshot; for those of expandable segments see :func:`mapped_at_start`. Of a
    block that was live at the beginning and freed later, only the requested size is on record: its
    size follows from its neighbours, see :func:`_size_until`, and with expandable segments,
    where every remainder is split off, from the request.
    """
    segments = list(segments)
    plain, blocks = _held_at_start(segments, trace)
    held = [*plain.values(), *mapped_at_start(segments, trace, settings)]
    addresses = sorted(blocks)
    first_uses: dict[str, dict[int, int]] = {"alloc": {}, "free_completed": {}}
    for index, event in enumerate(trace):
        if event["action"] in first_uses:
            first_uses[event["action"]].setdefault(event["addr"], index)
    made = sorted(first_uses["alloc"])
    start = []
    for segment in sorted(held, key=lambda each: int(each["address"])):
        first, end = segment["address"], segment["address"] + segment["total_size"]
        inside = addresses[bisect_left(addresses, first) : bisect_left(addresses, end)]
        row: list[dict[str, Any]] = []
        position = first
        for address, following in zip(inside, [*inside, end][1:], strict=True):
            size = blocks[address]["size"]
            if size is None:
                requested = blocks[address]["requested_size"]
                size = round_size(requested, settings.roundup_power2_divisions)
                if settings.max_split_size is not None and size >= settings.max_split_size:
                    size = following - address  # Blocks of this size are never split.
                elif segment["segment_type"] == "large" and not settings.expandable_segments:
                    size = _size_until(first_uses, made, address + size, following, address)
            row += _gap(position, address)
            row.append({**blocks[address], "address": address, "size": size})
            position = address + size
        start.append({**segment, "blocks": row + _gap(position, end)})
    return start


def _held_at_start(
    segments: Sequence[Json], trace: Sequence[Json]
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return the plain segments held, and the blocks in use, when recording began, by address.

    The size of a block is ``None`` where only the requested size is on record.
    """
    held = {
        segment["address"]: _segment(segment["address"], segment["total_size"], _owner_of(segment))
        for segment in segments
        if not segment.get("is_expandable")
    }
    blocks: dict[int, dict[str, Any]] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                known = {name: block[name] for name in ("size", "state")}
                blocks[address] = {"requested_size": block.get("requested_size", 0), **known}
            address += block["size"]
    for event in reversed(trace):
        action, address, size = event["action"], event.get("addr", 0), event["size"]
        if action == "segment_alloc":
            held.pop(address, None)
        elif action == "segment_free":
            kind = "small" if size == SMALL_SEGMENT else "large"
            held[address] = _segment(address, size, _owner(event, kind))
        elif action == "alloc":
            blocks.pop(address, None)
        elif action == "free_completed":
            blocks[address] = {"requested_size": size, "size": None, "state": PENDING}
        elif action == "free_requested" and address in blocks:
            blocks[address]["state"] = _LIVE
    return held, blocks


class _Owner(NamedTuple):
    """The stream and pool of a segment; they have at most one expandable segment."""

    stream: int
    segment_type: str
    segment_pool_id: PoolId


def _segment(address: int, size: int, owner: _Owner) -> dict[str, Any]:
    return {"address": address, "total_size": size, **owner._asdict()}


def _owner_of(segment: Json) -> _Owner:
    first, second = segment.get("segment_pool_id", SHARED_POOL)
    return _Owner(segment["stream"], segment["segment_type"], (first, second))


def _owner(event: Json, kind: str, last: _Owner | None = None) -> _Owner:
    """Return the owner by an event; before 2.12 only the segments at the end contain the pool."""
    first, second = event.get("pool_id", SHARED_POOL if last is None else last.segment_pool_id)
    return _Owner(event["stream"], kind, (first, second))


def _size_until(
    first: dict[str, dict[int, int]], made: Sequence[int], low: int, following: int, address: int
) -> int:
    """Return the bytes of a large block that was live from the beginning, until it was freed.

    Up to 1 MiB is handed out beyond the request, which ends at ``low``, when a free block fits
    almost. Free blocks of the large pool are never that small, so a small gap up to the
    ``following`` block belongs to this one; in a larger gap, the address ``made`` first during its
    life is where it ends. ``first``: when each address was first allocated, and given back.
    """
    if following - low <= SMALL_SIZE:
        return following - address
    inside = made[bisect_left(made, low) : bisect_right(made, low + SMALL_SIZE)]
    end = min(inside, key=first["alloc"].__getitem__, default=None)
    freed = first["free_completed"].get(address)
    if end is None or (freed is not None and first["alloc"][end] >= freed):
        return low - address
    return end - address


def _gap(start: int, end: int) -> list[dict[str, Any]]:
    """Return the free block between two addresses, if there is one."""
    free = {"address": start, "size": end - start, "requested_size": 0, "state": "inactive"}
    return [free] if end > start else []


_OF_BLOCKS = frozenset({"alloc", "free_requested", "free_completed"})
_PAGE = SMALL_SEGMENT
"""Bytes in which CUDA maps memory; pages of the large pool are several of these."""


def mapped_at_start(
    segments: Iterable[Json], trace: Sequence[Json], settings: AllocatorSettings
) -> list[dict[str, Any]]:
    """Return expandable segments' mapped ranges before ``trace``, which ends with ``segments``.

    Each is a segment as a snapshot has it, without blocks, and with ``reserved_from``: the first
    address of its expandable segment, as far as the trace shows.
    """
    held = {
        page: _owner_of(segment)
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
            **_segment(first * _PAGE, count * _PAGE, owner),
            "is_expandable": True,
            "reserved_from": bases[owner] * _PAGE,
        }
        for owner, first, count in _runs(held)
    ]


_Change = tuple[bool, _Owner, range]
"""Whether pages were mapped or unmapped, their owner, and the pages."""


def _changes(
    trace: Sequence[Json], held: dict[int, _Owner], settings: AllocatorSettings
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
            kind = "small" if round_size(size, divisions) <= SMALL_SIZE else "large"
            if action != "oom":
                sides[event["addr"] // _PAGE] = kind
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


def _bases(held: dict[int, _Owner], changes: Sequence[_Change]) -> dict[_Owner, int]:
    """Return the lowest page that each segment held at the start has, then or later.

    A segment without mapped pages is abandoned: later pages belong to another one.
    """
    bases: dict[_Owner, int] = {}
    count: dict[_Owner, int] = {}
    for page, owner in held.items():
        bases[owner] = min(page, bases.get(owner, page))
        count[owner] = count.get(owner, 0) + 1
    for mapped, owner, pages in changes:
        if count.get(owner, 0) > 0:
            count[owner] += len(pages) if mapped else -len(pages)
            bases[owner] = min(pages.start, bases[owner])
    return bases


def _runs(held: dict[int, _Owner]) -> Iterator[tuple[_Owner, int, int]]:
    """Return owner, first page and number of pages of every stretch without a gap."""
    numbered = enumerate(sorted(held))
    for (owner, _), stretch in groupby(numbered, lambda pair: (held[pair[1]], pair[1] - pair[0])):
        pages = [page for _, page in stretch]
        yield owner, pages[0], len(pages)


def _pages(address: int, size: int) -> range:
    return range(address // _PAGE, (address + size) // _PAGE)
