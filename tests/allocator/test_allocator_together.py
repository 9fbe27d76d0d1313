"""Invariants where streams, private pools, captures and changing settings are combined."""

from __future__ import annotations

import random

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorSettings, OutOfMemory
from pytest_gpumem.allocator.trace import Timeline

KIB, MIB = 1 << 10, 1 << 20
STREAMS = (0, 3, 35)
POOLS = ((0, 1), (0, 2))
CONFS = (
    "",
    "expandable_segments:True",
    "expandable_segments:False",
    "max_split_size_mb:24",
    "garbage_collection_threshold:0.4",
    "roundup_power2_divisions:4",
)


class Program:
    """A random program on one allocator, with the blocks that must be live."""

    def __init__(self, seed: int, version: tuple[int, int]) -> None:
        self.source = random.Random(seed)
        self.timeline = Timeline()
        settings = AllocatorSettings(version=version)
        self.allocator = Allocator(400 * MIB, settings, version, timeline=self.timeline)
        self.allocator.set_memory_fraction(0.8)
        self.live: dict[int, int] = {}
        self.open: list[tuple[int, int]] = []
        for pool in POOLS:
            self.allocator.pools.create(pool, use_on_oom=pool == POOLS[0])

    def step(self) -> None:
        self.source.choices(
            (self.allocate, self.free, self.use, self.wait, self.switch, self.release, self.set),
            (40, 36, 12, 6, 4, 1, 1),
        )[0]()

    def allocate(self) -> None:
        size = self.source.randrange(1, self.source.choice((2 * KIB, MIB, 5 * MIB, 60 * MIB)))
        try:
            address = self.allocator.malloc(size, self.source.choice(STREAMS))
        except OutOfMemory:
            return
        assert address not in self.live
        self.live[address] = size

    def free(self) -> None:
        if self.live:
            address = self.source.choice(list(self.live))
            del self.live[address]
            self.allocator.free(address)

    def use(self) -> None:
        if self.live:
            address = self.source.choice(list(self.live))
            self.allocator.record_stream(address, self.source.choice(STREAMS))

    def wait(self) -> None:
        self.timeline.finish_stream((0, self.source.choice(STREAMS)))

    def switch(self) -> None:
        if self.open and self.source.random() < 0.6:
            pool = self.open.pop()
            self.allocator.end_allocate_to_pool(pool)
            self.allocator.pools.release(pool)
        elif len(self.open) < len(POOLS):
            pool = next(pool for pool in POOLS if pool not in self.open)
            stream = self.source.choice(STREAMS)
            self.allocator.begin_allocate_to_pool(pool, lambda asked: asked == stream)
            self.open.append(pool)

    def release(self) -> None:
        self.allocator.empty_cache()

    def set(self) -> None:
        self.allocator.set_settings(self.source.choice(CONFS))

    def check(self) -> None:
        allocator = self.allocator
        end = 0
        live: dict[int, int] = {}
        pending = splits = split_bytes = requested = 0
        for segment in allocator.segments():
            assert segment["address"] >= end
            end = segment["address"]
            free_before = False
            for block in segment["blocks"]:
                assert block["address"] == end
                assert block["size"] % 512 == 0
                end += block["size"]
                free = block["state"] == "inactive"
                assert not (free and free_before)
                free_before = free
                if block["state"] == "active_allocated":
                    live[block["address"]] = block["requested_size"]
                elif free and not segment["is_expandable"] and len(segment["blocks"]) > 1:
                    splits, split_bytes = splits + 1, split_bytes + block["size"]
                elif not free:
                    pending += block["size"]
                if not free:
                    requested += block["requested_size"]
            assert end - segment["address"] == segment["total_size"]
        stats = allocator.stats()

        def current(quantity: str, scope: str = "all") -> int:
            found = stats[quantity][scope]["current"]
            assert found == stats[quantity][scope]["allocated"] - stats[quantity][scope]["freed"]
            assert found <= stats[quantity][scope]["peak"]
            return int(found)

        assert live == self.live
        assert live.keys() == allocator.live_blocks().keys()
        assert allocator.allocated == current("allocated_bytes")
        assert allocator.active == current("active_bytes") == allocator.allocated + pending
        assert requested == current("requested_bytes")
        assert (splits, split_bytes) == (current("inactive_split"), current("inactive_split_bytes"))
        assert current("reserved_bytes") == sum(s["total_size"] for s in allocator.segments())
        for quantity in ("active_bytes", "allocation", "inactive_split", "segment"):
            assert current(quantity) == current(quantity, "small_pool") + current(
                quantity, "large_pool"
            )
        assert stats["active_bytes"]["all"]["peak"] >= stats["allocated_bytes"]["all"]["peak"]


@pytest.mark.parametrize("version", [(2, 6), (2, 9), (2, 12), (2, 13), (2, 15)])
@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_after_random_programs(version: tuple[int, int], seed: int) -> None:
    program = Program(seed, version)
    for step in range(1000):
        program.step()
        if step % 25 == 0:
            program.check()
    program.check()
    while program.live:
        program.free()
    while program.open:
        pool = program.open.pop()
        program.allocator.end_allocate_to_pool(pool)
        program.allocator.pools.release(pool)
    for pool in POOLS:
        program.allocator.pools.release(pool)
    program.release()

    program.check()
    assert program.allocator.active == program.allocator.reserved == 0
