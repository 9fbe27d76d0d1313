"""Blocks that another stream uses when they are freed: active until the host sees its work done."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorError, AllocatorSettings
from pytest_gpumem.allocator.stream_uses import MOST_AHEAD
from pytest_gpumem.allocator.trace import Timeline

MIB, GIB = 1 << 20, 1 << 30
SIDE, OTHER = 3, 35
FIRST = 0x7F0000000000
"""Where the first segment of a device lands."""


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def allocator(timeline: Timeline) -> Allocator:
    return Allocator(GIB, timeline=timeline)


def value(allocator: Allocator, quantity: str, kind: str = "current", scope: str = "all") -> Any:
    return allocator.stats()[quantity][scope][kind]


def actions(allocator: Allocator) -> list[str]:
    return [entry.action for entry in allocator.trace]


def test_streams_never_share_blocks(allocator: Allocator) -> None:
    address = allocator.malloc(4 * MIB, stream=0)
    allocator.free(address)

    assert allocator.malloc(4 * MIB, stream=SIDE) == FIRST + 20 * MIB
    assert allocator.malloc(4 * MIB, stream=0) == address
    assert allocator.reserved == 40 * MIB


def test_a_freed_block_stays_active_until_the_host_waited_for_the_stream(
    allocator: Allocator, timeline: Timeline
) -> None:
    address = allocator.malloc(4 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.free(address)

    assert (allocator.allocated, allocator.active) == (0, 4 * MIB)
    assert allocator.malloc(4 * MIB) == address + 4 * MIB

    timeline.finish_stream((0, SIDE))
    # The allocator queries the events at its next allocation, not earlier.
    assert allocator.active == 8 * MIB
    assert allocator.malloc(2 * MIB) == address
    assert (allocator.allocated, allocator.active) == (6 * MIB, 6 * MIB)
    assert actions(allocator) == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "alloc",
        "free_completed",
        "alloc",
    ]


def test_a_use_on_the_blocks_own_stream_delays_no_free(allocator: Allocator) -> None:
    address = allocator.malloc(4 * MIB, stream=SIDE)
    allocator.record_stream(address, SIDE)
    allocator.free(address)

    assert allocator.active == 0
    assert actions(allocator)[-2:] == ["free_requested", "free_completed"]


def test_a_free_waits_for_every_using_stream(allocator: Allocator, timeline: Timeline) -> None:
    address = allocator.malloc(4 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.record_stream(address, OTHER)
    allocator.free(address)

    timeline.finish_stream((0, SIDE))
    assert allocator.malloc(4 * MIB) != address
    timeline.finish_stream((0, OTHER))
    assert allocator.malloc(4 * MIB) == address


def test_a_free_waits_for_unfinished_work_alone(allocator: Allocator, timeline: Timeline) -> None:
    timeline.finish_stream((0, SIDE))
    address = allocator.malloc(4 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.free(address)

    assert allocator.malloc(4 * MIB) != address


def test_waiting_for_the_device_waits_for_its_streams_only(
    allocator: Allocator, timeline: Timeline
) -> None:
    elsewhere = allocator.malloc(4 * MIB)
    allocator.record_stream(elsewhere, SIDE, device=1)
    here = allocator.malloc(4 * MIB)
    allocator.record_stream(here, SIDE)
    allocator.free(elsewhere)
    allocator.free(here)

    timeline.finish_device(0)

    assert allocator.malloc(4 * MIB) == here
    timeline.finish_device(1)
    assert allocator.malloc(4 * MIB) == elsewhere


def test_waiting_for_a_stream_waits_for_what_it_waited_for(
    allocator: Allocator, timeline: Timeline
) -> None:
    address = allocator.malloc(4 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.free(address)
    # The default stream waits for an event on the side stream; the host for the default stream.
    timeline.wait((0, 0), timeline.mark((0, SIDE)))
    timeline.finish_stream((0, 0))

    assert allocator.malloc(4 * MIB) == address


def test_the_host_runs_ahead_by_a_bounded_number_of_allocations(allocator: Allocator) -> None:
    address = allocator.malloc(4 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.free(address)

    for _ in range(MOST_AHEAD):
        allocator.malloc(512)
    assert allocator.active == 4 * MIB + MOST_AHEAD * 512
    assert allocator.malloc(4 * MIB) == address


def test_emptying_the_cache_waits_for_all(allocator: Allocator) -> None:
    address = allocator.malloc(4 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.free(address)

    allocator.empty_cache()

    assert (allocator.active, allocator.reserved) == (0, 0)
    assert actions(allocator)[-2:] == ["free_completed", "segment_free"]


def test_a_full_device_waits_before_it_gives_up(allocator: Allocator) -> None:
    address = allocator.malloc(600 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.free(address)

    allocator.malloc(600 * MIB)

    assert allocator.reserved == 600 * MIB
    assert allocator.stats()["num_alloc_retries"] == 1


def test_neighbours_merge_when_the_free_completes(allocator: Allocator, timeline: Timeline) -> None:
    first, middle, last = (allocator.malloc(4 * MIB) for _ in range(3))
    allocator.record_stream(middle, SIDE)
    for address in (middle, first, last):
        allocator.free(address)
    # 4 MiB in front, and 4 MiB merged with the 8 MiB that were never used.
    assert value(allocator, "inactive_split") == 2
    assert value(allocator, "inactive_split_bytes") == 16 * MIB

    timeline.finish_stream((0, SIDE))
    allocator.malloc(20 * MIB)

    assert value(allocator, "inactive_split") == 0
    assert allocator.reserved == 20 * MIB


def test_statistics_tell_active_from_allocated(allocator: Allocator, timeline: Timeline) -> None:
    address = allocator.malloc(4 * MIB - 100)
    allocator.record_stream(address, SIDE)
    allocator.free(address)
    allocator.malloc(6 * MIB)

    assert value(allocator, "allocation") == 1
    assert value(allocator, "active") == 2
    assert value(allocator, "allocated_bytes") == 6 * MIB
    assert value(allocator, "active_bytes") == 10 * MIB
    # Requested bytes are subtracted when the free completes.
    assert value(allocator, "requested_bytes") == 10 * MIB - 100
    assert value(allocator, "allocated_bytes", "freed", "large_pool") == 4 * MIB
    assert value(allocator, "active_bytes", "freed", "large_pool") == 0

    timeline.finish_stream((0, SIDE))
    allocator.malloc(512)

    assert value(allocator, "active_bytes") == 6 * MIB + 512
    assert value(allocator, "active_bytes", "freed") == 4 * MIB
    assert value(allocator, "requested_bytes") == 6 * MIB + 512


def test_peaks_of_active_and_allocated_are_independent(
    allocator: Allocator, timeline: Timeline
) -> None:
    address = allocator.malloc(8 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.free(address)
    again = allocator.malloc(7 * MIB)
    allocator.free(again)
    timeline.finish_stream((0, SIDE))
    allocator.malloc(MIB)

    assert allocator.peak_allocated == 8 * MIB
    assert value(allocator, "allocated_bytes", "peak") == 8 * MIB
    assert value(allocator, "active_bytes", "peak") == 15 * MIB
    assert value(allocator, "allocation", "peak") == 1
    assert value(allocator, "active", "peak") == 2

    allocator.reset_peak_stats()
    assert value(allocator, "active_bytes", "peak") == value(allocator, "active_bytes") == MIB
    assert allocator.peak_allocated == MIB


def test_peaks_reset_while_a_block_waits(allocator: Allocator) -> None:
    address = allocator.malloc(8 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.free(address)

    allocator.reset_peak_stats()

    assert value(allocator, "allocated_bytes", "peak") == 0
    assert value(allocator, "active_bytes", "peak") == 8 * MIB


def test_a_snapshot_shows_blocks_that_await_a_free(allocator: Allocator) -> None:
    address = allocator.malloc(4 * MIB - 100)
    allocator.record_stream(address, SIDE)
    allocator.free(address)

    (segment,) = allocator.segments()

    assert [block["state"] for block in segment["blocks"]] == ["active_pending_free", "inactive"]
    assert segment["allocated_size"] == 0
    assert segment["active_size"] == 4 * MIB
    assert segment["requested_size"] == 4 * MIB - 100


def test_a_live_block_that_another_stream_uses_is_active_allocated(allocator: Allocator) -> None:
    address = allocator.malloc(4 * MIB)
    allocator.record_stream(address, SIDE)

    assert allocator.block(address) == 4 * MIB
    assert allocator.live_blocks() == {address: 4 * MIB}
    assert allocator.segments()[0]["blocks"][0]["state"] == "active_allocated"


def test_record_stream_refuses_a_freed_block(allocator: Allocator) -> None:
    address = allocator.malloc(4 * MIB)
    allocator.free(address)

    with pytest.raises(AllocatorError, match="not a live block"):
        allocator.record_stream(address, SIDE)


def test_a_replayed_free_is_requested_and_completed_separately(allocator: Allocator) -> None:
    address = allocator.malloc(4 * MIB)
    allocator.request_free(address)
    assert (allocator.allocated, allocator.active) == (0, 4 * MIB)
    assert allocator.malloc(4 * MIB) != address

    allocator.complete_free(address)

    assert allocator.malloc(4 * MIB) == address
    with pytest.raises(AllocatorError, match="not a live block"):
        allocator.complete_free(address)


def test_pages_of_expandable_segments_wait_too(timeline: Timeline) -> None:
    settings = AllocatorSettings.parse("expandable_segments:True")
    allocator = Allocator(GIB, settings, timeline=timeline)
    address = allocator.malloc(40 * MIB)
    allocator.record_stream(address, SIDE)
    allocator.free(address)

    assert allocator.malloc(40 * MIB) == address + 40 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    assert value(allocator, "inactive_split_bytes", "allocated") == 0


def test_a_live_block_that_another_stream_uses_keeps_its_context(allocator: Allocator) -> None:
    address = allocator.malloc(4 * MIB, context="model.py:3")
    allocator.record_stream(address, SIDE)

    assert allocator.live_contexts() == {address: "model.py:3"}
    assert allocator.live_contexts().keys() == allocator.live_blocks().keys()
