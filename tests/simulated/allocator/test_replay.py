"""Replaying snapshots: where recording began, mismatches, other settings, bad input."""

from __future__ import annotations

import lzma
import pickle
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.simulated.allocator import Allocator, AllocatorError, SnapshotError, replay
from pytest_gpumem.simulated.allocator.replay import load_snapshot, starting_segments
from pytest_gpumem.simulated.allocator.settings import AllocatorSettings

MIB = 1 << 20
BASE = 0x7F0000000000


def program(allocator: Allocator) -> None:
    """Small and large blocks, two streams, a release in between."""
    small = [allocator.malloc(1000 * n) for n in range(1, 6)]
    large = [allocator.malloc(n * MIB + 100) for n in (3, 11, 30)]
    allocator.free(small[1])
    allocator.free(large[2])
    allocator.malloc(5 * MIB, stream=4)
    allocator.empty_cache()
    allocator.malloc(1500)
    allocator.free(large[0])
    allocator.malloc(2 * MIB)


def tail_of(snapshot: dict[str, Any], begin: int) -> dict[str, Any]:
    """The same snapshot, had recording begun after ``begin`` events."""
    return {**snapshot, "device_traces": [snapshot["device_traces"][0][begin:]]}


@pytest.fixture
def snapshot() -> dict[str, Any]:
    allocator = Allocator(1 << 34)
    program(allocator)
    return allocator.snapshot()


def test_a_complete_recording(snapshot: dict[str, Any]) -> None:
    result = replay(snapshot)

    assert result.first_mismatch is None
    assert (result.exact, result.exact_addresses, result.total) == (True, 11, 11)
    assert result.peak_reserved == (2 + 20 + 32 + 20) * MIB


def test_a_recording_that_began_at_any_moment(snapshot: dict[str, Any]) -> None:
    events = snapshot["device_traces"][0]
    starts = [
        index
        for index, event in enumerate(events)
        if event["action"] not in ("free_completed",)
        and (index == 0 or events[index - 1]["action"] not in ("segment_alloc", "segment_free"))
    ]
    for begin in starts[:-1]:
        result = replay(tail_of(snapshot, begin))
        assert result.first_mismatch is None, begin


def test_the_start_has_what_was_live_then(snapshot: dict[str, Any]) -> None:
    events = snapshot["device_traces"][0]
    begin = [event["action"] for event in events].index("free_requested")

    start = starting_segments(snapshot["segments"], events[begin:], AllocatorSettings())

    allocator = Allocator(1 << 34)
    for n in range(1, 6):
        allocator.malloc(1000 * n)
    for n in (3, 11, 30):
        allocator.malloc(n * MIB + 100)
    expected = [
        (segment["address"], [(b["address"], b["size"], b["state"]) for b in segment["blocks"]])
        for segment in allocator.segments()
    ]
    assert [
        (segment["address"], [(b["address"], b["size"], b["state"]) for b in segment["blocks"]])
        for segment in start
    ] == expected


def started(allocator: Allocator, begin: int) -> dict[int, int]:
    """Address -> size of what was live when recording began after ``begin`` events."""
    events = allocator.snapshot()["device_traces"][0][begin:]
    segments = starting_segments(allocator.segments(), events, AllocatorSettings())
    return {
        block["address"]: block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }


def test_a_small_gap_belongs_to_the_block_before_it() -> None:
    allocator = Allocator(1 << 34)
    whole = allocator.malloc(11 * MIB + MIB // 2)
    begin = len(allocator.trace)
    allocator.free(whole)
    allocator.malloc(12 * MIB)

    assert started(allocator, begin) == {whole: 12 * MIB}


def test_a_block_ends_where_its_neighbour_was_allocated() -> None:
    allocator = Allocator(1 << 34)
    first, second, third = (allocator.malloc(size * MIB) for size in (5, 6, 9))
    allocator.free(first)
    handed_out = allocator.malloc(4 * MIB + MIB // 2)
    allocator.free(second)
    assert (handed_out, allocator.block(handed_out)) == (first, 5 * MIB)
    begin = len(allocator.trace)
    allocator.malloc(3 * MIB)
    allocator.free(handed_out)

    assert started(allocator, begin) == {handed_out: 5 * MIB, third: 9 * MIB}


def test_a_wrong_address_is_found(snapshot: dict[str, Any]) -> None:
    trace = snapshot["device_traces"][0]
    index = next(i for i, event in enumerate(trace) if event["size"] == 2000)
    trace[index] = {**trace[index], "addr": trace[index]["addr"] + 1 * MIB}

    result = replay(snapshot)

    assert (result.exact, result.exact_addresses, result.total) == (False, 10, 11)
    assert result.first_mismatch is not None
    assert result.first_mismatch.startswith(
        f"device 0: event 2 is alloc of 2000 B at {BASE + 0x100400:#x}"
    )


def test_a_segment_too_many_is_found(snapshot: dict[str, Any]) -> None:
    trace = snapshot["device_traces"][0]
    trace.append({"action": "segment_alloc", "addr": 0x1000, "size": 2 * MIB, "stream": 0})

    result = replay(snapshot)

    assert result.exact_addresses == 11
    assert result.first_mismatch == "device 0: 20 events are recorded, 19 simulated"


def test_a_different_final_layout_is_found(snapshot: dict[str, Any]) -> None:
    snapshot["segments"][0]["blocks"][-1]["state"] = "active_allocated"

    result = replay(snapshot)

    assert not result.exact


def test_other_settings_may_be_tried(snapshot: dict[str, Any]) -> None:
    result = replay(snapshot, alloc_conf="roundup_power2_divisions:1")

    assert result.total == 11
    assert result.peak_allocated >= replay(snapshot).peak_allocated


@pytest.mark.parametrize("pack", [lambda data: data, lzma.compress])
def test_a_pickled_snapshot_is_read(snapshot: dict[str, Any], tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pack(pickle.dumps(snapshot)))

    assert load_snapshot(path) == snapshot
    assert replay(str(path)).exact


def test_a_pickle_that_names_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": Path()}))

    with pytest.raises(SnapshotError, match="it refers to pathlib"):
        replay(path)


@pytest.mark.parametrize("content", [b"", b"junk", b"\xfd7zXZ\x00junk"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)

    with pytest.raises(SnapshotError, match="Cannot read the memory snapshot"):
        replay(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="No such file"):
        replay(tmp_path / "none.pickle")


def test_other_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.pickle"
    path.write_bytes(pickle.dumps([1]))

    with pytest.raises(SnapshotError, match="it holds a list"):
        replay(path)
    with pytest.raises(SnapshotError, match="has no segments and device_traces"):
        replay({"segments": []})
    with pytest.raises(SnapshotError, match="holds no events"):
        replay({"segments": [], "device_traces": [[]]})


def test_private_pools_are_refused(snapshot: dict[str, Any]) -> None:
    snapshot["segments"][0]["segment_pool_id"] = (0, 1)
    with pytest.raises(AllocatorError, match=r"private pool \(0, 1\); private pools are not"):
        Allocator(1 << 34).restore(snapshot["segments"])


def test_only_an_unused_allocator_is_restored(snapshot: dict[str, Any]) -> None:
    allocator = Allocator(1 << 34)
    allocator.restore(snapshot["segments"])
    assert [s["address"] for s in allocator.segments()] == [
        s["address"] for s in snapshot["segments"]
    ]

    with pytest.raises(AllocatorError, match="Only an allocator without segments"):
        allocator.restore(snapshot["segments"])


def test_a_restored_allocator_counts_what_it_holds(snapshot: dict[str, Any]) -> None:
    original = Allocator(1 << 34)
    program(original)
    restored = Allocator(1 << 34)
    restored.restore(original.segments())

    original.reset_peak_stats()
    original.reset_accumulated_stats()
    assert restored.stats() == original.stats()
    assert restored.live_blocks() == original.live_blocks()
