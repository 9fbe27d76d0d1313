"""The page's data on a recorded memory snapshot: its events, and the result of a replay."""

from __future__ import annotations

import os.path
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any

from pytest_gpumem.allocator.replayed import START, Course, DeviceReplay, ReplayResult, Usage
from pytest_gpumem.attribution.composition import shown_path
from pytest_gpumem.attribution.frames import (
    EARLIER,
    UNKNOWN,
    StackFacts,
    category,
    frames_in,
    is_torchs,
    python_files,
    stack_facts,
)
from pytest_gpumem.attribution.history import CATEGORIES, FOREVER
from pytest_gpumem.report.html.page import packed

Json = Mapping[str, Any]

FREE, ELSEWHERE = -1, len(CATEGORIES) - 1
"""The numbers that stand for a free part of a segment, and for a block of unknown category."""


@dataclass
class _Block:
    address: int
    bytes: int
    facts: StackFacts
    born: int
    stretch: int
    """Number of a range of events in one phase: a block freed in its own range is temporary."""
    died: int = FOREVER
    kept: bool = True


@dataclass
class _Places:
    """The numbering of source lines (places), and of kinds of blocks allocated there."""

    numbers: dict[tuple[str, str | None, str | None, str | None], int] = field(default_factory=dict)
    stacks: list[tuple[str, ...]] = field(default_factory=list)
    kinds: dict[tuple[int, int], int] = field(default_factory=dict)

    def kind(self, block: _Block) -> int:
        """Return the number of the kind of ``block``: its bytes and place."""
        facts = block.facts
        kind = category(facts, kept=block.kept)
        key = (kind, facts.site, facts.function, facts.operator)
        place = self.numbers.setdefault(key, len(self.numbers))
        if place == len(self.stacks):
            self.stacks.append(facts.stack)
        return self.kinds.setdefault((block.bytes, place), len(self.kinds))

    def to_list(self) -> list[dict[str, Any]]:
        """Return the JSON form, in the order of their numbers."""
        names = ("category", "site", "function", "operator")
        return [
            {**dict(zip(names, key, strict=True)), "stack": list(stack)}
            for key, stack in zip(self.numbers, self.stacks, strict=True)
        ]


def recording_of(
    name: str, result: ReplayResult, *, notes: Sequence[str], used_elsewhere: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the page's data on a replay, and for each device a packed text of its events.

    Sizes are bytes. ``notes`` are the sentences on the replay that the command prints.
    """
    devices = [_device(device) for device in result.devices]
    return {
        "name": name,
        "categories": CATEGORIES,
        "exact": result.exact,
        "exact_addresses": result.exact_addresses,
        "total": result.total,
        "version": ".".join(map(str, result.version)),
        "recorded_conf": result.recorded_conf,
        "alloc_conf": result.alloc_conf,
        "gpu": result.gpu,
        "used_elsewhere": used_elsewhere,
        "notes": list(notes),
        "devices": [known for known, _ in devices],
    }, [packed(columns) for _, columns in devices]


def _device(device: DeviceReplay) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data of a device, and the effect of each event on its blocks and bytes."""
    course = device.courses[0]
    blocks = _blocks(course)
    places = _Places()
    events = _numbered(blocks, places, len(course.trace))
    start = Counter(places.kind(block) for block in blocks if block.born == START)
    runs = [_run(device.recorded, course, partial(_known, blocks))]
    runs += [_run(device.what_if, device.courses[1], lambda _: {})] if device.what_if else []
    return {
        "device": device.device,
        "events": device.events,
        "capacity": device.capacity,
        "places": places.to_list(),
        "kinds": [list(kind) for kind in places.kinds],
        "start": [list(item) for item in start.items()],
        "recorded": runs[0],
        "what_if": runs[1] if device.what_if else None,
    }, {
        "blocks": events.tolist(),
        "reserved": [each.reserved.tolist() for each in device.courses],
        "split": [each.split.tolist() for each in device.courses],
    }


def _run(usage: Usage, course: Course, known: Any) -> dict[str, Any]:
    return {
        "usage": {**asdict(usage), "fragmentation": usage.fragmentation},
        "fullest": course.fullest + 1,
        "segments": {
            "peak": _segments(course.then, known(course.fullest)),
            "end": _segments(course.end, known(len(course.trace) - 1)),
        },
    }


def _blocks(course: Course) -> list[_Block]:
    """Return every block of a recording, with the data of its stack."""
    facts = _facts_of(course.trace)
    live = {
        address: _Block(address, size, EARLIER, START, 0) for address, size in _held(course.start)
    }
    blocks = list(live.values())
    stretch, during = 0, ""
    for index, (event, change) in enumerate(zip(course.trace, course.allocated[1:], strict=False)):
        if event["action"] == "alloc":
            own = facts[_key(event)]
            if own.during != during:
                stretch, during = stretch + 1, own.during
            block = live[event["addr"]] = _Block(event["addr"], change, own, index, stretch)
            blocks.append(block)
        elif change < 0 and (dead := live.pop(event["addr"], None)) is not None:
            dead.died = index
            dead.kept = dead.stretch != stretch
    return blocks


def _held(segments: Iterable[Json]) -> Iterator[tuple[int, int]]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield address, block["size"]
            address += block["size"]


def _numbered(blocks: Sequence[_Block], places: _Places, events: int) -> array[int]:
    """Return each event's effect: 0 none, 1 + 2n allocates a block of kind n, 2 + 2n frees one."""
    numbers = array("q", bytes(8 * events))
    for block in blocks:
        number = 2 * places.kind(block)
        if block.born != START:
            numbers[block.born] = number + 1
        if block.died != FOREVER:
            numbers[block.died] = number + 2
    return numbers


def _known(blocks: Sequence[_Block], position: int) -> dict[int, int]:
    """Return the numbers of the categories of live blocks after an event, by address."""
    return {
        block.address: CATEGORIES.index(category(block.facts, kept=block.kept))
        for block in blocks
        if block.born <= position < block.died
    }


def _segments(segments: Sequence[Json], known: Mapping[int, int]) -> list[dict[str, Any]]:
    return [
        {
            "bytes": segment["total_size"],
            "stream": segment["stream"],
            "small": segment["segment_type"] == "small",
            "parts": _parts(segment, known),
        }
        for segment in sorted(segments, key=lambda one: (-one["total_size"], one["address"]))
    ]


def _parts(segment: Json, known: Mapping[int, int]) -> list[list[int]]:
    """Return category, bytes and count of adjacent blocks, merged if of the same category."""
    parts: list[list[int]] = []
    address = segment["address"]
    for block in segment["blocks"]:
        free = block["state"] == "inactive"
        holds = FREE if free else known.get(address, ELSEWHERE)
        if parts and parts[-1][0] == holds:
            parts[-1][1] += block["size"]
            parts[-1][2] += 1
        else:
            parts.append([holds, block["size"], 1])
        address += block["size"]
    return parts


def _facts_of(trace: Sequence[Json]) -> dict[tuple[int, ...], StackFacts]:
    """Return the facts of each stack of a trace, by :func:`_key`."""
    stacks: dict[tuple[int, ...], Any] = {}
    for event in trace:
        if (key := _key(event)) not in stacks:
            stacks[key] = frames_in(event)
    files = {name for frames in stacks.values() for name in python_files(frames)}
    # Only files of the program: on a simulated GPU, stacks contain the plugin's, too.
    absolute = [PurePath(name) for name in files if not is_torchs(name)]
    foreign = {"site-packages", "dist-packages", "lib", "pytest_gpumem"}
    own = [one.parent for one in absolute if one.is_absolute() and foreign.isdisjoint(one.parts)]
    root = os.path.commonpath(own) if own else ""
    paths = {name: shown_path(name, root) for name in files}
    return {key: stack_facts(one, paths) if one else UNKNOWN for key, one in stacks.items()}


def _key(event: Json) -> tuple[int, ...]:
    """Return a key that is equal for equal stacks: a snapshot contains each frame object once."""
    frames = event.get("frames")
    return tuple(map(id, frames)) if isinstance(frames, list) else ()
