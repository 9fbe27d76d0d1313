"""Histories with missing events are refused with a reason; truncated histories are replayed."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.allocator import Allocator, SnapshotError, replay

MIB = 1 << 20


@pytest.fixture
def snapshot() -> dict[str, Any]:
    """Record two rounds of allocating, freeing and allocating one block: 0x7f0000000000."""
    allocator = Allocator(1 << 34)
    for _ in range(2):
        allocator.free(allocator.malloc(3 * MIB))
        allocator.free(allocator.malloc(3 * MIB))
    return allocator.snapshot()


def actions(snapshot: dict[str, Any]) -> list[str]:
    return [event["action"] for event in snapshot["device_traces"][0]]


def without(snapshot: dict[str, Any], *indices: int) -> dict[str, Any]:
    kept = [event for i, event in enumerate(snapshot["device_traces"][0]) if i not in set(indices)]
    return {**snapshot, "device_traces": [kept]}


def without_action(snapshot: dict[str, Any], action: str) -> dict[str, Any]:
    return without(snapshot, *(i for i, each in enumerate(actions(snapshot)) if each == action))


@pytest.mark.parametrize(
    ("left_out", "sentence"),
    [
        (
            "alloc",
            "event 3 is free_requested of the block at 0x7f0000000000, so the last one before it "
            "there, event 2, must be alloc, and is free_completed",
        ),
        (
            "free_requested",
            "event 2 is free_completed of the block at 0x7f0000000000, so the last one before it "
            "there, event 1, must be free_requested, and is alloc",
        ),
        (
            "free_completed",
            "event 3 is alloc of the block at 0x7f0000000000, so the last one before it there, "
            "event 2, must be free_completed, and is free_requested",
        ),
    ],
)
def test_a_history_without_a_kind_of_event_is_refused(
    snapshot: dict[str, Any], left_out: str, sentence: str
) -> None:
    with pytest.raises(SnapshotError) as refusal:
        replay(without_action(snapshot, left_out))

    assert str(refusal.value) == (
        f"The history of device 0 has gaps: {sentence}. Only a recording of all actions, without "
        "a pause, can be replayed."
    )


def test_a_history_with_a_pause_in_the_recording_is_refused(snapshot: dict[str, Any]) -> None:
    assert actions(snapshot)[3:8] == [
        "free_completed",
        "alloc",
        "free_requested",
        "free_completed",
        "alloc",
    ]

    with pytest.raises(SnapshotError, match=r"event 3 is alloc of .* event 2, must be free_compl"):
        replay(without(snapshot, 3, 4, 5, 6))


def test_a_history_whose_beginning_was_overwritten_is_replayed(snapshot: dict[str, Any]) -> None:
    for kept in range(1, len(actions(snapshot))):
        trace = snapshot["device_traces"][0][-kept:]
        result = replay({**snapshot, "device_traces": [trace]})
        assert result.first_mismatch is None, kept
