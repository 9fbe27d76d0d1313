"""Bytes over time by category: short enough for a report, with exact peaks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pytest_gpumem.attribution.composition import category_of, shown_path
from pytest_gpumem.attribution.history import CATEGORIES, BlockLifetime, History

BUCKETS = 200
"""Parts of a time line; of each, the samples are kept where it is lowest and highest, where most is
reserved, and where most of that lies in free parts of segments."""

MOST_SPANS = 200
"""Windows of phases that are kept, the longest; a phase may be entered at every step."""


def timeline_of(history: History, stray_reserved: int = 0) -> dict[str, Any] | None:
    """Return the allocated bytes over the events of ``history``; ``None`` where there were none.

    ``positions`` are the samples: 0 is before the first event, n after the nth. ``categories`` has
    the bytes of each at every sample, so a sample's sum is exactly what was allocated then. The
    samples hold the lowest and the highest point of every stretch of events, the first, the last
    and the peak of each phase: no peak is lost. ``blocks`` contains the block that was allocated
    (bytes above 0) or freed (below 0) by the event before each sample, as the number of its place;
    place -1 is none: before the first event, and where a simulated allocator got a segment.
    ``reserved``, where it is known, is without the ``stray_reserved`` bytes that others held
    before; ``split`` is what of all segments that are partly in use is free.
    """
    if not history.length:
        return None
    kept = sorted(_kept(history))
    lives: dict[str, list[BlockLifetime]] = defaultdict(list)
    for life in history.lifetimes:
        lives[category_of(history, life)].append(life)
    totals = {}
    for category in CATEGORIES:
        allocated = history.allocated_by(lives[category])
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


def thin_timeline(line: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return the time line ``line`` with about ``most`` of its samples.

    It keeps its first and last one, the highest of every stretch, and so the peak, and that of each
    phase.
    """
    count = len(line["positions"])
    if count <= most:
        return dict(line)
    totals = [sum(at) for at in zip(*line["categories"].values(), strict=True)] or [0] * count
    kept = {0, count - 1}
    kept.update(max(range(a, b), key=totals.__getitem__) for a, b in pairwise(_edges(count, most)))
    positions = line["positions"]
    for _, begin, end in line["phases"]:
        inside = range(bisect_left(positions, begin), bisect_right(positions, end))
        kept.update([max(inside, key=totals.__getitem__)] if inside else [])
    places = sorted(kept)
    names = [name for name in ("positions", "blocks", "reserved", "split") if name in line]
    categories = line["categories"].items()
    return {
        **line,
        **{name: [line[name][at] for at in places] for name in names},
        "categories": {name: [values[at] for at in places] for name, values in categories},
    }


def _kept(history: History) -> set[int]:
    allocated = history.allocated()
    kept = {0, len(allocated) - 1}
    kept.update(position + 1 for position in history.peaks().values())
    for begin, end in pairwise(_edges(len(allocated), BUCKETS)):
        stretch = range(begin, end)
        kept.add(max(stretch, key=allocated.__getitem__))
        kept.add(min(stretch, key=allocated.__getitem__))
        for series in filter(None, (history.reserved, history.split)):
            kept.add(max(stretch, key=series.__getitem__))
    return kept


def _edges(length: int, parts: int) -> list[int]:
    """Return where each of so many parts of a sequence begins, and the end of the last."""
    count = min(parts, length)
    return [length * number // count for number in range(count + 1)]


def _blocks(history: History, kept: Sequence[int]) -> dict[str, list[Any]]:
    """Return the block of the event before each sample, and the places that these refer to."""
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
