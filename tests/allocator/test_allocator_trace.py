"""The order of events, and the fields of each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_gpumem.allocator import Allocator, OutOfMemory, TraceEntry

MIB = 1 << 20


def actions(allocator: Allocator) -> list[str]:
    return [entry.action for entry in allocator.trace]


def test_a_miss_a_hit_and_a_free() -> None:
    allocator = Allocator(1 << 30)
    address = allocator.malloc(1000, stream=3)
    second = allocator.malloc(600, stream=3)
    allocator.free(address)

    assert list(allocator.trace) == [
        TraceEntry("segment_alloc", address, 2 * MIB, 3),
        TraceEntry("alloc", address, 1000, 3),
        TraceEntry("alloc", second, 600, 3),
        TraceEntry("free_requested", address, 1000, 3),
        TraceEntry("free_completed", address, 1000, 3),
    ]


def test_empty_cache_frees_large_segments_first_by_stream_size_address() -> None:
    allocator = Allocator(1 << 40)
    sizes = ((512, 0), (40 * MIB, 1), (30 * MIB, 1), (50 * MIB, 0), (30 * MIB, 1))
    a, b, c, d, e = (allocator.malloc(size, stream) for size, stream in sizes)
    for address in (e, d, c, b, a):
        allocator.free(address)
    before = len(allocator.trace)

    allocator.empty_cache()

    assert [entry[:4] for entry in allocator.trace[before:]] == [
        ("segment_free", d, 50 * MIB, 0),
        ("segment_free", c, 30 * MIB, 1),
        ("segment_free", e, 30 * MIB, 1),
        ("segment_free", b, 40 * MIB, 1),
        ("segment_free", a, 2 * MIB, 0),
    ]


def test_a_full_device_releases_the_cache_and_tries_again() -> None:
    allocator = Allocator(100 * MIB)
    first = allocator.malloc(60 * MIB)
    allocator.free(first)
    before = len(allocator.trace)

    second = allocator.malloc(70 * MIB)

    assert [entry[:3] for entry in allocator.trace[before:]] == [
        ("segment_free", first, 60 * MIB),
        ("segment_alloc", second, 70 * MIB),
        ("alloc", second, 70 * MIB),
    ]
    stats = allocator.stats()
    assert (stats["num_alloc_retries"], stats["num_sync_all_streams"], stats["num_ooms"]) == (
        1,
        1,
        0,
    )


def test_an_oom_event_has_the_free_bytes_and_the_rounded_request() -> None:
    allocator = Allocator(100 * MIB, used_elsewhere=10 * MIB)
    allocator.malloc(60 * MIB)

    with pytest.raises(OutOfMemory):
        allocator.malloc(31 * MIB - 100, stream=2)

    assert allocator.trace[-1] == TraceEntry("oom", 30 * MIB, 31 * MIB, 2)


def test_the_trace_is_a_view_that_follows_new_events() -> None:
    allocator = Allocator(1 << 30)
    trace = allocator.trace
    assert len(trace) == 0

    address = allocator.malloc(512)
    assert (len(trace), trace[-1].action) == (2, "alloc")

    allocator.free(address)
    assert isinstance(trace, Sequence)
    assert [entry.action for entry in trace[2:]] == ["free_requested", "free_completed"]
    assert len(trace) == 4


def test_a_free_event_shows_the_context_of_its_allocation() -> None:
    allocator = Allocator(1 << 30)
    first = allocator.malloc(512, context="forward")
    second = allocator.malloc(512)
    allocator.free(first)
    allocator.free(second, context="backward")
    allocator.empty_cache()

    assert [(entry.action, entry.context) for entry in allocator.trace] == [
        ("segment_alloc", "forward"),
        ("alloc", "forward"),
        ("alloc", None),
        ("free_requested", "forward"),
        ("free_completed", "forward"),
        ("free_requested", "backward"),
        ("free_completed", "backward"),
        ("segment_free", "forward"),
    ]


def test_the_trace_can_be_cleared() -> None:
    allocator = Allocator(1 << 30)
    address = allocator.malloc(512)
    assert len(allocator.trace) == 2

    allocator.trace.clear()
    assert list(allocator.trace) == []

    allocator.free(address)
    assert [entry.action for entry in allocator.trace] == ["free_requested", "free_completed"]
