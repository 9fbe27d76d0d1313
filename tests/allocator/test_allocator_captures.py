"""Stream captures: the allocator releases and reuses no memory that a graph may need."""

from __future__ import annotations

import pytest

from pytest_gpumem.allocator import (
    Allocator,
    AllocatorSettings,
    OutOfMemory,
)
from pytest_gpumem.allocator.trace import Timeline

MIB, GIB = 1 << 20, 1 << 30
GRAPH = (1, 0)
CAPTURED, FORKED = 3, 35
Version = tuple[int, int]


class Capturing:
    """An allocator while ``CAPTURED`` and ``FORKED`` are captured into a pool of their own."""

    def __init__(self, version: Version = (2, 13), conf: str = "") -> None:
        self.timeline = Timeline()
        settings = AllocatorSettings.parse(conf, version)
        self.allocator = Allocator(GIB, settings, version, timeline=self.timeline)

    def begin(self) -> None:
        self.allocator.begin_allocate_to_pool(GRAPH, lambda stream: stream in (CAPTURED, FORKED))
        self.allocator.captures += 1

    def end(self) -> None:
        self.allocator.captures -= 1
        self.allocator.end_allocate_to_pool(GRAPH)


def test_memory_of_a_graph_stays_reserved_until_its_pool_is_released() -> None:
    capturing = Capturing()
    allocator = capturing.allocator
    capturing.begin()
    address = allocator.malloc(30 * MIB, CAPTURED)
    allocator.free(address)
    capturing.end()

    allocator.empty_cache()
    assert allocator.reserved == 30 * MIB
    allocator.pools.release(GRAPH)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_two_graphs_share_a_pool() -> None:
    capturing = Capturing()
    allocator = capturing.allocator
    for _ in range(2):
        capturing.begin()
        allocator.free(allocator.malloc(30 * MIB, CAPTURED))
        capturing.end()
    assert allocator.reserved == 30 * MIB

    allocator.pools.release(GRAPH)
    allocator.empty_cache()
    assert allocator.reserved == 30 * MIB
    allocator.pools.release(GRAPH)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_the_cache_is_not_emptied_for_a_captured_allocation() -> None:
    capturing = Capturing()
    allocator = capturing.allocator
    allocator.free(allocator.malloc(700 * MIB))
    capturing.begin()

    with pytest.raises(OutOfMemory):
        allocator.malloc(700 * MIB, CAPTURED)
    allocator.empty_cache()

    assert allocator.reserved == 700 * MIB
    assert allocator.stats()["num_alloc_retries"] == 0
    assert allocator.stats()["num_sync_all_streams"] == 0


@pytest.mark.parametrize(("version", "released"), [((2, 12), False), ((2, 13), True)])
def test_up_to_2_12_any_open_pool_counts_as_a_capture(version: Version, released: bool) -> None:
    allocator = Allocator(GIB, version=version)
    allocator.free(allocator.malloc(700 * MIB))
    allocator.begin_allocate_to_pool((0, 1), lambda stream: True)

    if released:
        allocator.malloc(700 * MIB)
    else:
        with pytest.raises(OutOfMemory):
            allocator.malloc(700 * MIB)


def test_blocks_with_stream_uses_freed_in_a_capture_wait_for_its_end() -> None:
    capturing = Capturing()
    allocator = capturing.allocator
    capturing.begin()
    address = allocator.malloc(30 * MIB, CAPTURED)
    allocator.record_stream(address, FORKED)
    allocator.free(address)
    capturing.timeline.finish_device(0)

    assert allocator.malloc(30 * MIB, CAPTURED) != address
    assert allocator.active == 60 * MIB
    assert allocator.segments()[0]["blocks"][0]["state"] == "active_pending_free"
    capturing.end()
    # Uses that were noted during the capture end with it: no event is needed.
    allocator.malloc(512)
    assert allocator.active == 30 * MIB + 512


def test_a_use_before_the_capture_still_waits_for_its_stream() -> None:
    capturing = Capturing()
    allocator = capturing.allocator
    address = allocator.malloc(30 * MIB)
    allocator.record_stream(address, FORKED)
    capturing.begin()
    allocator.free(address)
    capturing.end()

    assert allocator.malloc(30 * MIB) != address
    capturing.timeline.finish_stream((0, FORKED))
    assert allocator.malloc(30 * MIB) == address


class TestReuseInACapture:
    """``graph_capture_record_stream_reuse``: blocks are reused where the captured order is safe."""

    def freed(self, *, joined: bool, conf: str) -> tuple[Capturing, int]:
        capturing = Capturing((2, 13), conf)
        capturing.begin()
        address = capturing.allocator.malloc(30 * MIB, CAPTURED)
        capturing.allocator.record_stream(address, FORKED)
        capturing.allocator.free(address)
        if joined:
            timeline = capturing.timeline
            timeline.wait((0, CAPTURED), timeline.mark((0, FORKED)))
        return capturing, address

    def test_a_block_is_reused_after_the_streams_have_joined(self) -> None:
        conf = "graph_capture_record_stream_reuse:True"
        capturing, address = self.freed(joined=True, conf=conf)

        assert capturing.allocator.malloc(30 * MIB, CAPTURED) == address

    def test_a_block_is_not_reused_before_the_streams_have_joined(self) -> None:
        conf = "graph_capture_record_stream_reuse:True"
        capturing, address = self.freed(joined=False, conf=conf)

        assert capturing.allocator.malloc(30 * MIB, CAPTURED) != address

    def test_a_block_is_not_reused_on_another_stream(self) -> None:
        conf = "graph_capture_record_stream_reuse:True"
        capturing, address = self.freed(joined=True, conf=conf)

        assert capturing.allocator.malloc(30 * MIB, FORKED) != address
        assert capturing.allocator.malloc(30 * MIB, CAPTURED) == address

    def test_a_block_is_not_reused_without_the_setting(self) -> None:
        capturing, address = self.freed(joined=True, conf="")

        assert capturing.allocator.malloc(30 * MIB, CAPTURED) != address
