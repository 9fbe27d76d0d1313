"""Whether the recorded events of a device follow from each other."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpumem.allocator.recording import Json, SnapshotError

_COMES_AFTER = {
    "alloc": "free_completed",
    "free_requested": "alloc",
    "free_completed": "free_requested",
}
"""Event of a block -> the event that must precede it at the same address."""


def check_history(trace: Sequence[Json], device: int) -> None:
    """Make sure that every block is allocated, freed and given back in turn.

    A history that was cut at its beginning, as ``max_entries`` does, is whole from there on. One
    that leaves out a kind of event (``skip_actions``) is not, nor one with a pause.

    Raises:
        SnapshotError: events are missing; the sentence names the first place.
    """
    last: dict[int, int] = {}
    for index, event in enumerate(trace):
        wanted = _COMES_AFTER.get(event["action"])
        if wanted is None:
            continue
        before = last.get(event["addr"])
        last[event["addr"]] = index
        if before is not None and trace[before]["action"] != wanted:
            raise SnapshotError(
                f"The history of device {device} has gaps: event {index} is {event['action']} of"
                f" the block at {event['addr']:#x}, so the last one before it there, event"
                f" {before}, must be {wanted}, and is {trace[before]['action']}. Only a recording"
                " of all actions, without a pause, can be replayed."
            )
