"""Invariants that hold after any program, whatever the settings."""

from __future__ import annotations

import random

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorSettings, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20
CONFS = [
    "",
    "expandable_segments:True",
    "expandable_segments:True,large_segment_size_mb:12,max_split_size_mb:24",
    "garbage_collection_threshold:0.5",
    "max_split_size_mb:24,garbage_collection_threshold:0.3",
    "roundup_power2_divisions:[1:2,>:4]",
    "roundup_power2_divisions:8,expandable_segments:True",
]


def check(allocator: Allocator, requests: dict[int, int]) -> None:
    """Check that segments tile their ranges, agree with every sum, have no two free neighbours."""
    end = 0
    live: dict[int, int] = {}
    for segment in allocator.segments():
        assert segment["address"] >= end
        position = segment["address"]
        free_before = False
        for block in segment["blocks"]:
            assert block["address"] == position
            assert block["size"] > 0
            assert block["size"] % 512 == 0
            free = block["state"] == "inactive"
            assert not (free and free_before)
            free_before = free
            if not free:
                live[position] = block["size"]
                assert block["size"] >= block["requested_size"] == requests[position]
            position += block["size"]
        assert position - segment["address"] == segment["total_size"]
        end = position
    assert live == allocator.live_blocks()
    assert live.keys() == requests.keys()
    assert allocator.allocated == allocator.active == sum(live.values())
    assert allocator.requested == sum(requests.values())
    assert allocator.reserved == sum(s["total_size"] for s in allocator.segments())
    assert allocator.allocated <= allocator.peak_allocated <= allocator.peak_reserved


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("seed", range(3))
def test_invariants_hold_after_random_programs(conf: str, seed: int) -> None:
    source = random.Random(seed)
    total = 400 * MIB
    allocator = Allocator(total, AllocatorSettings.parse(conf))
    allocator.set_memory_fraction(0.8)
    requests: dict[int, int] = {}
    refused = 0
    for step in range(800):
        if requests and source.random() < 0.49:
            address = source.choice(list(requests))
            del requests[address]
            allocator.free(address)
        elif source.random() < 0.02:
            allocator.empty_cache()
        else:
            largest = source.choice((2 * KIB, 300 * KIB, 2 * MIB, 15 * MIB, 90 * MIB))
            size = source.randrange(1, largest)
            try:
                address = allocator.malloc(size, source.choice((0, 0, 7)))
            except OutOfMemory:
                refused += 1
            else:
                requests[address] = size
        if step % 50 == 0:
            check(allocator, requests)
    check(allocator, requests)
    assert refused > 0
    assert allocator.peak_reserved <= int(0.8 * total) + 20 * MIB
    for address in requests:
        allocator.free(address)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])


@pytest.mark.parametrize("conf", CONFS)
def test_the_same_program_gives_the_same_trace(conf: str) -> None:
    def trace() -> list[tuple[object, ...]]:
        source = random.Random(1)
        allocator = Allocator(1 << 34, AllocatorSettings.parse(conf))
        live: list[int] = []
        for _ in range(400):
            if live and source.random() < 0.4:
                allocator.free(live.pop(source.randrange(len(live))))
            else:
                live.append(allocator.malloc(source.randrange(1, 30 * MIB)))
        return list(allocator.trace)

    assert trace() == trace()
