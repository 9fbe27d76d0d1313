"""Replays of snapshots: the state where recording began, and the first difference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorError, replay
from pytest_gpumem.allocator.settings import AllocatorSettings
from pytest_gpumem.allocator.start import starting_segments

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
    """Return the snapshot of a recording that began after ``begin`` events."""
    return {**snapshot, "device_traces": [snapshot["device_traces"][0][begin:]]}


@pytest.fixture
def snapshot() -> dict[str, Any]:
    allocator = Allocator(1 << 34)
    program(allocator)
    return allocator.snapshot()


def test_a_complete_recording_replays_exactly(snapshot: dict[str, Any]) -> None:
    result = replay(snapshot)

    assert result.first_mismatch is None
    assert (result.exact, result.exact_addresses, result.total) == (True, 11, 11)
    assert result.peak_reserved == (2 + 20 + 32 + 20) * MIB


def test_a_recording_that_began_at_any_moment_replays_exactly(snapshot: dict[str, Any]) -> None:
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


def test_the_restored_start_has_the_blocks_that_were_live(snapshot: dict[str, Any]) -> None:
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
    """Return address -> size of the blocks that were live after ``begin`` events."""
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


def test_a_wrong_address_is_reported(snapshot: dict[str, Any]) -> None:
    trace = snapshot["device_traces"][0]
    index = next(i for i, event in enumerate(trace) if event["size"] == 2000)
    trace[index] = {**trace[index], "addr": trace[index]["addr"] + 1 * MIB}

    result = replay(snapshot)

    assert (result.exact, result.exact_addresses, result.total) == (False, 10, 11)
    assert result.first_mismatch is not None
    assert result.first_mismatch.startswith(
        f"device 0: event 2 is alloc of 2000 B at {BASE + 0x100400:#x}"
    )


def test_an_extra_segment_is_reported(snapshot: dict[str, Any]) -> None:
    trace = snapshot["device_traces"][0]
    trace.append({"action": "segment_alloc", "addr": 0x1000, "size": 2 * MIB, "stream": 0})

    result = replay(snapshot)

    assert result.exact_addresses == 11
    assert result.first_mismatch == "device 0: 20 events are recorded, 19 simulated"


def test_a_different_final_layout_is_not_exact(snapshot: dict[str, Any]) -> None:
    snapshot["segments"][0]["blocks"][-1]["state"] = "active_allocated"

    result = replay(snapshot)

    assert not result.exact


def pooled(allocator: Allocator) -> list[int]:
    """A private pool among other allocations; the addresses of its live blocks."""
    allocator.malloc(3 * MIB)
    allocator.pools.create((0, 1))
    allocator.begin_allocate_to_pool((0, 1), lambda stream: True)
    inside = [allocator.malloc(size) for size in (1000, 4 * MIB, 5 * MIB)]
    allocator.end_allocate_to_pool((0, 1))
    allocator.malloc(1000)
    allocator.free(inside[1])
    allocator.malloc(4 * MIB)
    allocator.begin_allocate_to_pool((0, 1), lambda stream: True)
    inside[1] = allocator.malloc(3 * MIB)
    allocator.end_allocate_to_pool((0, 1))
    return inside


def test_private_pools_are_replayed_separately() -> None:
    for version in ((2, 13), (2, 6)):
        allocator = Allocator(1 << 34, version=version)
        pooled(allocator)

        # Before 2.12 only the segments at the end say which pool it was.
        result = replay(allocator.snapshot())

        assert result.first_mismatch is None
        assert (result.exact_addresses, result.total) == (7, 7)


def test_a_private_pool_that_releases_its_memory_is_replayed() -> None:
    allocator = Allocator(1 << 34)
    for address in pooled(allocator):
        allocator.free(address)
    while allocator.pools.get((0, 1)).uses:
        allocator.pools.release((0, 1))
    allocator.empty_cache()
    assert [segment["segment_pool_id"] for segment in allocator.segments()] == [(0, 0)] * 2

    result = replay(allocator.snapshot())

    assert result.first_mismatch is None
    assert replay(tail_of(allocator.snapshot(), 8)).first_mismatch is None


def shared(allocator: Allocator) -> None:
    """Blocks that another stream uses, freed before that stream is done."""
    first, second, third = (allocator.malloc(size * MIB) for size in (30, 30, 2))
    allocator.record_stream(first, 7)
    allocator.record_stream(second, 7)
    allocator.free(first)
    allocator.malloc(20 * MIB)
    allocator.free(second)
    allocator.empty_cache()
    allocator.malloc(25 * MIB)
    allocator.free(third)


def test_a_block_that_a_stream_still_uses_is_freed_later() -> None:
    allocator = Allocator(1 << 34)
    shared(allocator)
    snapshot = allocator.snapshot()
    actions = [event["action"] for event in snapshot["device_traces"][0]]
    pairs = list(pairwise(actions))
    assert ("free_requested", "free_completed") in pairs
    assert ("free_requested", "segment_alloc") in pairs

    result = replay(snapshot)

    assert result.first_mismatch is None
    assert (result.peak_allocated, result.peak_reserved) == (
        allocator.peak_allocated,
        allocator.peak_reserved,
    )


def test_a_recording_may_begin_while_a_stream_uses_a_freed_block() -> None:
    allocator = Allocator(1 << 34)
    shared(allocator)
    snapshot = allocator.snapshot()
    begin = [event["action"] for event in snapshot["device_traces"][0]].index("free_requested") + 1
    late = tail_of(snapshot, begin)

    result = replay(late)

    assert result.first_mismatch is None
    start = starting_segments(late["segments"], late["device_traces"][0], AllocatorSettings())
    states = [block["state"] for segment in start for block in segment["blocks"]]
    assert states.count("active_pending_free") == 1
    # The block is active then, and no longer allocated.
    assert result.peak_allocated == allocator.peak_allocated - 10 * MIB


def test_restore_refuses_a_used_allocator(snapshot: dict[str, Any]) -> None:
    allocator = Allocator(1 << 34)
    allocator.restore(snapshot["segments"])
    assert [s["address"] for s in allocator.segments()] == [
        s["address"] for s in snapshot["segments"]
    ]

    with pytest.raises(AllocatorError, match="Only an allocator without segments"):
        allocator.restore(snapshot["segments"])


def test_a_restored_allocator_counts_oversize_blocks() -> None:
    settings = AllocatorSettings.parse("max_split_size_mb:32")
    original, restored = Allocator(1 << 34, settings), Allocator(1 << 34, settings)
    large = original.malloc(40 * MIB)
    original.malloc(MIB)
    restored.restore(original.segments())

    assert restored.stats()["oversize_allocations"]["current"] == 1
    restored.free(large)
    assert restored.stats()["oversize_allocations"]["current"] == 0


def test_statistics_of_a_restored_allocator_count_its_blocks(snapshot: dict[str, Any]) -> None:
    original = Allocator(1 << 34)
    program(original)
    restored = Allocator(1 << 34)
    restored.restore(original.segments())

    original.reset_peak_stats()
    original.reset_accumulated_stats()
    assert restored.stats() == original.stats()
    assert restored.live_blocks() == original.live_blocks()
