"""Expandable segments: pages mapped, reused and unmapped, their statistics and snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.allocator import (
    Allocator,
    AllocatorError,
    AllocatorSettings,
    OutOfMemory,
    SnapshotError,
    replay,
)
from pytest_gpumem.allocator.start import starting_segments

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BASE = 0x7F0000000000


def expandable(total: int = 16 * GIB, version: tuple[int, int] = (2, 13)) -> Allocator:
    return Allocator(total, AllocatorSettings.parse("expandable_segments:True", version), version)


@pytest.fixture
def allocator() -> Allocator:
    return expandable()


def events(allocator: Allocator, begin: int = 0) -> list[tuple[str, int, int]]:
    """Return (action, MiB from the base, bytes)"""
    return [(e.action, (e.addr - BASE) // MIB, e.size) for e in allocator.trace[begin:]]


def ranges(allocator: Allocator) -> list[tuple[int, list[tuple[int, bool]]]]:
    """Return (MiB from the base, [(block MiB, live)]) of each mapped range."""
    return [
        (
            (segment["address"] - BASE) // MIB,
            [(b["size"] // MIB, b["state"] == "active_allocated") for b in segment["blocks"]],
        )
        for segment in allocator.segments()
    ]


def test_the_small_pool_maps_2_mib_at_a_time(allocator: Allocator) -> None:
    allocator.malloc(1000)
    allocator.malloc(600)
    allocator.malloc(MIB)
    allocator.malloc(MIB)

    assert events(allocator) == [
        ("segment_map", 0, 2 * MIB),
        ("alloc", 0, 1000),
        ("alloc", 0, 600),
        ("alloc", 0, MIB),
        ("segment_map", 2, 2 * MIB),
        ("alloc", 1, MIB),
    ]
    assert allocator.reserved == 4 * MIB


def test_the_large_pool_maps_20_mib_pages_behind_its_last_free_block(allocator: Allocator) -> None:
    allocator.malloc(5 * MIB)
    allocator.malloc(17 * MIB)
    allocator.malloc(30 * MIB)

    assert events(allocator) == [
        ("segment_map", 0, 20 * MIB),
        ("alloc", 0, 5 * MIB),
        ("segment_map", 20, 20 * MIB),
        ("alloc", 5, 17 * MIB),
        ("segment_map", 40, 20 * MIB),
        ("alloc", 22, 30 * MIB),
    ]
    assert ranges(allocator) == [(0, [(5, True), (17, True), (30, True), (8, False)])]


def test_large_blocks_are_split_to_the_byte(allocator: Allocator) -> None:
    address = allocator.malloc(19 * MIB + MIB // 2)

    assert allocator.block(address) == 19 * MIB + MIB // 2
    assert allocator.allocated == allocator.requested


def test_each_pool_and_stream_has_a_segment_of_its_own(allocator: Allocator) -> None:
    for stream in (0, 5):
        allocator.malloc(512, stream)
        allocator.malloc(2 * MIB, stream)

    space = 18 * GIB
    large = -(-space // (20 * MIB)) * 20 * MIB
    assert [segment["address"] - BASE for segment in allocator.segments()] == [
        0,
        space,
        space + large,
        2 * space + large,
    ]


def test_a_block_that_cannot_grow_is_preferred_to_one_that_can(allocator: Allocator) -> None:
    first = allocator.malloc(8 * MIB)
    allocator.malloc(7 * MIB)  # the page's remaining 5 MiB could grow
    allocator.free(first)

    assert allocator.malloc(4 * MIB) == first


def test_empty_cache_unmaps_whole_pages_in_free_blocks(allocator: Allocator) -> None:
    _, middle, _ = (allocator.malloc(size * MIB) for size in (10, 50, 20))
    allocator.free(middle)
    before = len(allocator.trace)

    allocator.empty_cache()

    assert events(allocator, before) == [("segment_unmap", 20, 40 * MIB)]
    assert allocator.reserved == 40 * MIB
    assert ranges(allocator) == [(0, [(10, True), (10, False)]), (60, [(20, True)])]


def test_a_gap_is_mapped_again_together_with_the_free_part_before_it(allocator: Allocator) -> None:
    _, middle, _ = (allocator.malloc(size * MIB) for size in (10, 50, 20))
    allocator.free(middle)
    allocator.empty_cache()
    before = len(allocator.trace)

    again = allocator.malloc(45 * MIB)

    assert again == middle
    assert events(allocator, before) == [("segment_map", 20, 40 * MIB), ("alloc", 10, 45 * MIB)]
    assert ranges(allocator) == [(0, [(10, True), (45, True), (5, False), (20, True)])]


def test_a_block_larger_than_the_gap_is_placed_behind_it(allocator: Allocator) -> None:
    _, middle, _ = (allocator.malloc(size * MIB) for size in (10, 50, 20))
    allocator.free(middle)
    allocator.empty_cache()

    assert allocator.malloc(51 * MIB) - BASE == 80 * MIB


def test_neighbouring_unmapped_ranges_merge(allocator: Allocator) -> None:
    _, middle, last = (allocator.malloc(size * MIB) for size in (10, 50, 20))
    allocator.free(middle)
    allocator.empty_cache()
    allocator.free(last)
    allocator.empty_cache()
    before = len(allocator.trace)

    allocator.malloc(100 * MIB)

    assert events(allocator, before) == [("segment_map", 20, 100 * MIB), ("alloc", 10, 100 * MIB)]


def test_pages_are_unmapped_when_the_device_fills_up_while_mapping() -> None:
    allocator = expandable(170 * MIB)
    _, first, between, second, _ = (allocator.malloc(size * MIB) for size in (20, 40, 20, 40, 20))
    allocator.free(first)
    allocator.free(second)
    allocator.empty_cache()
    allocator.free(between)
    assert allocator.reserved == 60 * MIB
    allocator.memory.used_elsewhere = 60 * MIB
    before = len(allocator.trace)

    with pytest.raises(OutOfMemory):
        allocator.malloc(70 * MIB)

    # 40 of the 50 free MiB fill the first gap; the second gap needs 20 more.
    assert events(allocator, before)[:2] == [
        ("segment_map", 20, 40 * MIB),
        ("segment_unmap", 20, 60 * MIB),
    ]
    assert [entry.action for entry in allocator.trace[before + 2 :]] == ["oom"]
    assert allocator.reserved == 40 * MIB


def test_maps_and_unmaps_have_the_context_of_the_allocation(allocator: Allocator) -> None:
    allocator.free(allocator.malloc(30 * MIB, context="forward"))
    allocator.empty_cache()

    assert [(entry.action, entry.context) for entry in allocator.trace] == [
        ("segment_map", "forward"),
        ("alloc", "forward"),
        ("free_requested", "forward"),
        ("free_completed", "forward"),
        ("segment_unmap", "forward"),
    ]


def test_both_ends_of_a_free_block_may_stay_mapped(allocator: Allocator) -> None:
    _, middle, _ = (allocator.malloc(size * MIB) for size in (10, 62, 8))
    allocator.free(middle)

    allocator.empty_cache()

    assert ranges(allocator) == [(0, [(10, True), (10, False)]), (60, [(12, False), (8, True)])]


def test_a_part_of_a_page_stays_mapped(allocator: Allocator) -> None:
    _, second, _ = (allocator.malloc(size * MIB) for size in (2, 10, 2))
    allocator.free(second)

    allocator.empty_cache()

    assert allocator.reserved == 20 * MIB


def test_a_segment_without_mapped_pages_is_released(allocator: Allocator) -> None:
    first = allocator.malloc(30 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])

    assert allocator.malloc(30 * MIB) > first


def test_statistics_count_pages_and_no_segments(allocator: Allocator) -> None:
    first = allocator.malloc(5 * MIB)
    allocator.malloc(17 * MIB)
    allocator.free(first)
    stats = allocator.stats()

    zeros = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    assert stats["segment"]["all"] == zeros
    assert stats["inactive_split"]["all"] == zeros
    assert stats["inactive_split_bytes"]["large_pool"] == zeros
    assert stats["reserved_bytes"]["large_pool"]["current"] == 40 * MIB
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (2, 0)
    allocator.empty_cache()
    assert allocator.stats()["num_device_free"] == 0


def test_a_full_device_unmaps_and_tries_again() -> None:
    allocator = expandable(100 * MIB)
    first = allocator.malloc(60 * MIB, stream=1)
    allocator.free(first)
    before = len(allocator.trace)

    allocator.malloc(70 * MIB, stream=2)

    assert [action for action, _, _ in events(allocator, before)] == [
        "segment_unmap",
        "segment_map",
        "alloc",
    ]
    assert allocator.stats()["num_alloc_retries"] == 1


@pytest.mark.parametrize(
    ("version", "end"),
    [
        ((2, 13), "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"),
        ((2, 14), "is reserved by PyTorch but unallocated."),
        ((2, 15), "is reserved by PyTorch but unallocated."),
    ],
)
def test_out_of_memory_by_version(version: tuple[int, int], end: str) -> None:
    allocator = expandable(100 * MIB, version)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(101 * MIB)

    assert str(caught.value).endswith(end)
    assert allocator.trace[-1].action == "oom"
    assert allocator.malloc(100 * MIB) == BASE


def test_the_memory_fraction_counts_the_size_of_a_plain_segment() -> None:
    allocator = expandable(100 * MIB)
    allocator.set_memory_fraction(0.3)
    allocator.malloc(2 * MIB)

    with pytest.raises(OutOfMemory):
        allocator.malloc(19 * MIB)


def test_snapshots_mark_segments_as_expandable(allocator: Allocator) -> None:
    allocator.malloc(512)

    assert [segment["is_expandable"] for segment in allocator.segments()] == [True]
    assert allocator.snapshot()["allocator_settings"]["expandable_segments"] is True


def test_a_recording_from_an_empty_allocator_replays_exactly(allocator: Allocator) -> None:
    addresses = [allocator.malloc(size * MIB) for size in (10, 50, 20, 1, 5)]
    allocator.free(addresses[1])
    allocator.empty_cache()
    allocator.malloc(45 * MIB, stream=3)

    result = replay(allocator.snapshot())

    assert result.first_mismatch is None
    assert (result.exact, result.total) == (True, 6)


def recorded_from(allocator: Allocator, begin: int) -> dict[str, Any]:
    """Return the snapshot of a recording that began after ``begin`` events."""
    snapshot = allocator.snapshot()
    return {**snapshot, "device_traces": [snapshot["device_traces"][0][begin:]]}


def test_the_state_at_the_start_follows_from_maps_and_unmaps(allocator: Allocator) -> None:
    allocator.malloc(5 * MIB)
    second = allocator.malloc(30 * MIB)
    begin = len(allocator.trace)
    allocator.free(second)
    allocator.empty_cache()
    allocator.malloc(20 * MIB)
    assert events(allocator, begin) == [
        ("free_requested", 5, 30 * MIB),
        ("free_completed", 5, 30 * MIB),
        ("segment_unmap", 20, 20 * MIB),
        ("segment_map", 20, 20 * MIB),
        ("alloc", 5, 20 * MIB),
    ]
    snapshot = recorded_from(allocator, begin)

    (start,) = starting_segments(
        snapshot["segments"], snapshot["device_traces"][0], allocator.settings
    )
    result = replay(snapshot)

    blocks = [(block["size"] // MIB, block["state"]) for block in start["blocks"]]
    assert (start["address"], start["total_size"]) == (BASE, 40 * MIB)
    assert blocks == [(5, "active_allocated"), (30, "active_allocated"), (5, "inactive")]
    assert (result.first_mismatch, result.exact_addresses, result.total) == (None, 1, 1)
    assert (result.peak_allocated, result.peak_reserved) == (35 * MIB, 40 * MIB)


def test_pages_unmapped_before_the_recording_are_mapped_again_first(allocator: Allocator) -> None:
    first, second = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    begin = len(allocator.trace)
    assert allocator.malloc(12 * MIB) == first

    result = replay(recorded_from(allocator, begin))

    assert second == first + 20 * MIB
    assert (result.first_mismatch, result.exact_addresses) == (None, 1)


@pytest.mark.parametrize("version", [(2, 6), (2, 13)])
def test_a_recording_that_began_at_any_moment_replays_exactly(version: tuple[int, int]) -> None:
    allocator = expandable(version=version)
    small = [allocator.malloc(700 * KIB) for _ in range(9)]
    large = [allocator.malloc(size * MIB) for size in (2, 30, 9, 45)]
    other = allocator.malloc(25 * MIB, stream=7)
    for address in (*small[2:7], large[1], large[3], other):
        allocator.free(address)
    allocator.empty_cache()
    for size in (800 * KIB, 70 * MIB, 3 * MIB):
        allocator.malloc(size)
        allocator.malloc(size, stream=7)
    allocator.free(large[0])

    for begin in range(len(allocator.trace) - 1):
        result = replay(recorded_from(allocator, begin), version=version)
        assert result.first_mismatch is None, begin


def test_the_size_of_unmapped_pages_tells_their_pool(allocator: Allocator) -> None:
    small = [allocator.malloc(MIB) for _ in range(3)]
    large = allocator.malloc(18 * MIB)
    for address in (*small, large):
        allocator.free(address)
    begin = len(allocator.trace)
    allocator.empty_cache()
    allocator.malloc(2 * MIB)
    snapshot = recorded_from(allocator, begin)

    start = starting_segments(
        snapshot["segments"], snapshot["device_traces"][0], allocator.settings
    )

    assert sorted((each["segment_type"], each["total_size"] // MIB) for each in start) == [
        ("large", 20),
        ("small", 4),
    ]
    assert replay(snapshot).first_mismatch is None


def test_a_recording_that_began_later_replays_with_other_settings() -> None:
    plain = Allocator(16 * GIB)
    held = plain.malloc(11 * MIB)
    plain.malloc(2 * MIB)
    plain.free(held)
    snapshot = plain.snapshot()
    snapshot["device_traces"] = [snapshot["device_traces"][0][2:]]

    result = replay(snapshot, alloc_conf="expandable_segments:True")

    assert result.exact  # under the recorded settings
    assert (result.peak_allocated, result.peak_reserved) == (13 * MIB, 20 * MIB)


def test_missing_settings_are_inferred_from_the_segments(allocator: Allocator) -> None:
    allocator.malloc(5 * MIB)
    allocator.malloc(30 * MIB)
    snapshot = allocator.snapshot()
    del snapshot["allocator_settings"]

    result = replay(snapshot)

    assert (result.exact, result.recorded_conf) == (True, "expandable_segments:True")


def test_settings_that_contradict_the_segments_are_refused(allocator: Allocator) -> None:
    allocator.malloc(5 * MIB)
    allocator.malloc(30 * MIB)
    snapshot = recorded_from(allocator, 2)
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"

    with pytest.raises(SnapshotError, match="start cannot be restored: There are expandable segme"):
        replay(snapshot)


def test_only_an_allocator_with_expandable_segments_takes_their_state(allocator: Allocator) -> None:
    allocator.malloc(1000)

    with pytest.raises(
        AllocatorError, match="expandable segments, and the settings do not turn them on"
    ):
        Allocator(16 * GIB).restore(allocator.segments())


def test_a_restored_allocator_allocates_as_the_original_one(allocator: Allocator) -> None:
    allocator.malloc(5 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    restored = expandable()

    restored.restore(allocator.segments())

    assert (restored.allocated, restored.reserved) == (5 * MIB, 40 * MIB)
    assert ranges(restored) == ranges(allocator) == [(0, [(5, True), (35, False)])]
    assert restored.malloc(60 * MIB) == allocator.malloc(60 * MIB) == BASE + 5 * MIB
    assert restored.reserved == allocator.reserved == 80 * MIB
