"""Bytes over time by category: short enough for a report, with exact peaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pytest_gpumem.attribution.composition import category_of, shown_path
from pytest_gpumem.attribution.history import CATEGORIES, BlockLifetime, History

BUCKETS = 40
"""The number of stretches of a time line, for each of which the lowest, the highest and the most
reserved sample are kept. A JSON report of 2,000 tests is then 20 MiB."""

MOST_SPANS = 200
"""The most windows of phases that are kept, the longest ones: each step may enter a phase."""


def timeline_of(history: History, stray_reserved: int = 0) -> dict[str, Any] | None:
    """Return the allocated bytes over the events of ``history``; ``None`` where there were none.

    ``positions`` are the samples: 0 is before the first event, n after the nth. ``categories`` has
    the bytes of each category at every sample; their sum is exactly the allocated bytes. Samples
    are the lowest and the highest point of every stretch of events, the first, the last, and the
    peak of each phase. ``blocks`` has the block that the event before each sample allocated (bytes
    above 0) or freed (below 0), and the number of its place; -1 is none: before the first event,
    and for a new segment of a simulated allocator. ``reserved``, if known, is without the
    ``stray_reserved`` bytes from before the test; ``split`` are the bytes of inactive splits.
    """
    if not history.length:
        return None
    kept = sorted(_kept(history))
    lives: dict[str, list[BlockLifetime]] = defaultdict(list)
    for life in history.lifetimes:
        lives[category_of(history, life)].append(life)
    totals = {}
    for category in CATEGORIES:
        allocated = history.allocated(lives[category])
        if any(series := [allocated[position] for position in kept]):
            totals[category] = series
    line: dict[str, Any] = {
        "events": history.length,
        "positions": kept,
        "categories": totals,
        **_blocks(history, kept),
        "phases": _spans(history),
    }
    if history.reserved:
        line["reserved"] = [history.reserved[position] - stray_reserved for position in kept]
    if history.split:
        line["split"] = [history.split[position] for position in kept]
    return line


def _kept(history: History) -> set[int]:
    allocated, reserved = history.allocated(), history.reserved
    kept = {0, len(allocated) - 1}
    kept.update(position + 1 for position in history.peaks().values())
    if history.split:
        kept.add(max(range(len(allocated)), key=history.split.__getitem__))
    count = min(BUCKETS, len(allocated))
    for begin, end in pairwise(len(allocated) * part // count for part in range(count + 1)):
        stretch = range(begin, end)
        kept.add(max(stretch, key=allocated.__getitem__))
        kept.add(min(stretch, key=allocated.__getitem__))
        if reserved:  # its highest point is mostly, but not always, that of the allocated bytes
            kept.add(max(stretch, key=lambda at: (reserved[at], allocated[at])))
    return kept


def _blocks(history: History, kept: Sequence[int]) -> dict[str, list[Any]]:
    """Return the block of the event before each sample, and the list of places."""
    wanted = {position - 1 for position in kept}
    events: dict[int, tuple[BlockLifetime, int]] = {}
    for life in history.lifetimes:
        if life.freed_at in wanted:
            events[life.freed_at] = life, -life.nbytes
        if life.made_at in wanted and life.made_at >= 0:
            events[life.made_at] = life, life.nbytes
    places: dict[str, int] = {}
    blocks = []
    for position in kept:
        number, nbytes = -1, 0
        if position - 1 in events:
            life, nbytes = events[position - 1]
            number = places.setdefault(_place(life, history), len(places))
        blocks.append([number, nbytes])
    return {"places": list(places), "blocks": blocks}


def _spans(history: History) -> list[list[Any]]:
    spans = [span for span in history.phases if span.begin <= history.length]
    longest = sorted(spans, key=lambda span: span.begin - span.end)[:MOST_SPANS]
    return [
        [span.name, max(span.begin, 0), min(span.end, history.length)]
        for span in sorted(longest, key=lambda span: (span.begin, -span.end))
    ]


def _place(life: BlockLifetime, history: History) -> str:
    origin = life.origin
    if origin is None:
        return "unknown"
    if origin.library:
        return f"{origin.library} workspace"
    place = history.place_of(origin)
    line = f"{shown_path(place[0], history.root)}:{place[1]}" if place else ""
    return " ".join(filter(None, (line, origin.operator_name))) or "unknown"
