"""The first difference between a recording and its replay: in events, or in the final layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_gpumem.allocator.recording import Json, line_of
from pytest_gpumem.allocator.replayed import Mismatch
from pytest_gpumem.allocator.trace import FREE, Trace

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
    """Block address -> size, state and segment."""
    layout = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            layout[address] = (block["size"], block["state"], segment["address"])
            address += block["size"]
    return layout
