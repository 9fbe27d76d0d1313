"""The allocator against a simple reference implementation, on random programs.

The reference keeps lists and searches them, and updates every statistic at once; it shares no code
with the allocator but the settings.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorSettings, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20
BASE = 0x7F0000000000
ARRAYS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


@dataclass
class PlainBlock:
    address: int
    size: int
    live: bool = False
    requested: int = 0


@dataclass
class PlainSegment:
    small: bool
    stream: int
    blocks: list[PlainBlock]


@dataclass
class PlainAllocator:
    total: int
    max_split: float = float("inf")
    non_split_rounding: int = 20 * MIB
    segments: list[PlainSegment] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    next_address: int = BASE

    def __post_init__(self) -> None:
        self.stats = {
            name: {scope: zero() for scope in ("all", "small_pool", "large_pool")}
            for name in ARRAYS
        }
        self.stats |= {"oversize_allocations": zero(), "oversize_segments": zero()}
        self.counts = {"num_alloc_retries": 0, "num_ooms": 0, "num_device_free": 0}

    def change(self, name: str, small: bool, amount: int) -> None:
        for scope in ("all", "small_pool" if small else "large_pool"):
            add(self.stats[name][scope], amount)

    def reserved(self) -> int:
        return int(self.stats["reserved_bytes"]["all"]["current"])

    def malloc(self, size: int, stream: int) -> int | None:
        rounded = -(-size // 512) * 512
        small = rounded <= MIB
        candidates = [
            (block.size, block.address, segment, block)
            for segment in self.segments
            for block in segment.blocks
            if not block.live
            and (segment.small, segment.stream) == (small, stream)
            and block.size >= rounded
        ]
        best = min(candidates, key=lambda each: each[:2], default=None)
        if best is not None and (
            rounded < self.max_split <= best[0]
            or (rounded >= self.max_split and best[0] >= rounded + self.non_split_rounding)
        ):
            best = None
        if best is None:
            made = self.new_segment(small, stream, rounded)
            if made is None:
                return None
            segment, block = made, made.blocks[0]
        else:
            segment, block = best[2], best[3]
        return self.hand_out(segment, block, rounded, size)

    def hand_out(self, segment: PlainSegment, block: PlainBlock, rounded: int, size: int) -> int:
        small = segment.small
        was_split = len(segment.blocks) > 1
        rest = block.size - rounded
        if rest >= 512 if small else (rest > MIB and rounded < self.max_split):
            index = segment.blocks.index(block)
            segment.blocks.insert(index + 1, PlainBlock(block.address + rounded, rest))
            block.size = rounded
            if was_split:
                self.change("inactive_split_bytes", small, -rounded)
            else:
                self.change("inactive_split_bytes", small, rest)
                self.change("inactive_split", small, 1)
        elif was_split:
            self.change("inactive_split_bytes", small, -block.size)
            self.change("inactive_split", small, -1)
        block.live, block.requested = True, size
        self.change("allocation", small, 1)
        self.change("allocated_bytes", small, block.size)
        self.change("active", small, 1)
        self.change("active_bytes", small, block.size)
        self.change("requested_bytes", small, size)
        if block.size >= self.max_split:
            add(self.stats["oversize_allocations"], 1)
        return block.address

    def new_segment(self, small: bool, stream: int, rounded: int) -> PlainSegment | None:
        size = (
            2 * MIB
            if small
            else 20 * MIB
            if rounded < 10 * MIB
            else -(-rounded // (2 * MIB)) * 2 * MIB
        )
        if self.reserved() + size > self.total and not (
            self.release_oversize(small, stream, rounded) and self.reserved() + size <= self.total
        ):
            self.release_all()
            self.counts["num_alloc_retries"] += 1
        if self.reserved() + size > self.total:
            self.counts["num_ooms"] += 1
            return None
        segment = PlainSegment(small, stream, [PlainBlock(self.next_address, size)])
        self.next_address += size
        self.segments.append(segment)
        self.change("segment", small, 1)
        self.change("reserved_bytes", small, size)
        if size >= self.max_split:
            add(self.stats["oversize_segments"], 1)
        return segment

    def release_oversize(self, small: bool, stream: int, rounded: int) -> bool:
        if self.max_split == float("inf"):
            return False
        target = max(rounded, int(self.max_split))
        free = [
            (block.size, block.address, segment)
            for segment in self.segments
            for block in segment.blocks
            if not block.live and (segment.small, segment.stream) == (small, stream)
        ]
        enough = [each for each in free if each[0] >= target]
        if enough:
            self.release(min(enough, key=lambda each: each[:2])[2])
            return True
        released = 0
        for size, _, segment in sorted(free, key=lambda each: each[:2], reverse=True):
            if released >= target or size < self.max_split:
                break
            released += size
            self.release(segment)
        return released >= target

    def release_all(self) -> None:
        for segment in list(self.segments):
            if len(segment.blocks) == 1 and not segment.blocks[0].live:
                self.release(segment)

    def release(self, segment: PlainSegment) -> None:
        size = segment.blocks[0].size
        self.segments.remove(segment)
        self.counts["num_device_free"] += 1
        self.change("segment", segment.small, -1)
        self.change("reserved_bytes", segment.small, -size)
        if size >= self.max_split:
            add(self.stats["oversize_segments"], -1)

    def free(self, address: int) -> None:
        segment, index = next(
            (segment, index)
            for segment in self.segments
            for index, block in enumerate(segment.blocks)
            if block.address == address and block.live
        )
        block, small = segment.blocks[index], segment.small
        size = block.size
        self.change("allocation", small, -1)
        self.change("allocated_bytes", small, -size)
        if size >= self.max_split:
            add(self.stats["oversize_allocations"], -1)
        self.change("active", small, -1)
        self.change("active_bytes", small, -size)
        self.change("requested_bytes", small, -block.requested)
        before = [free.size for free in segment.blocks if not free.live]
        parts_before = before if len(segment.blocks) > 1 else []
        block.live = False
        merged: list[PlainBlock] = []
        for each in segment.blocks:
            if merged and not merged[-1].live and not each.live:
                merged[-1].size += each.size
            else:
                merged.append(each)
        segment.blocks = merged
        parts = [free.size for free in merged if not free.live] if len(merged) > 1 else []
        self.change("inactive_split", small, len(parts) - len(parts_before))
        self.change("inactive_split_bytes", small, sum(parts) - sum(parts_before))


def zero() -> dict[str, int]:
    return {"current": 0, "peak": 0, "allocated": 0, "freed": 0}


def add(stat: dict[str, int], amount: int) -> None:
    stat["current"] += amount
    stat["peak"] = max(stat["peak"], stat["current"])
    stat["allocated" if amount > 0 else "freed"] += abs(amount)


def random_size(source: random.Random) -> int:
    return source.randrange(1, source.choice((2 * KIB, 300 * KIB, 2 * MIB, 15 * MIB, 70 * MIB)))


@pytest.mark.parametrize(
    "conf", ["", "max_split_size_mb:24", "max_split_size_mb:40,max_non_split_rounding_mb:30"]
)
@pytest.mark.parametrize("seed", range(6))
def test_both_allocators_agree_on_random_programs(seed: int, conf: str) -> None:
    source = random.Random(seed)
    settings = AllocatorSettings.parse(conf)
    allocator = Allocator(500 * MIB, settings)
    plain = PlainAllocator(
        500 * MIB,
        settings.max_split_size or float("inf"),
        settings.max_non_split_rounding,
    )
    live: list[int] = []
    for _ in range(1200):
        if live and source.random() < 0.48:
            address = live.pop(source.randrange(len(live)))
            allocator.free(address)
            plain.free(address)
        elif source.random() < 0.01:
            allocator.empty_cache()
            plain.release_all()
        else:
            size, stream = random_size(source), source.choice((0, 0, 0, 7))
            expected = plain.malloc(size, stream)
            try:
                address = allocator.malloc(size, stream)
            except OutOfMemory:
                assert expected is None
            else:
                assert address == expected
                live.append(address)
        stats = allocator.stats()
        assert {key: stats[key] for key in plain.stats} == plain.stats
        assert {key: stats[key] for key in plain.counts} == plain.counts
    assert plain.counts["num_ooms"] > 0
    assert plain.counts["num_alloc_retries"] > plain.counts["num_ooms"]
    assert layout(allocator) == [
        [(block.address, block.size, block.live) for block in segment.blocks]
        for segment in sorted(plain.segments, key=lambda segment: segment.blocks[0].address)
    ]


def layout(allocator: Allocator) -> list[list[tuple[int, int, bool]]]:
    return [
        [(b["address"], b["size"], b["state"] == "active_allocated") for b in segment["blocks"]]
        for segment in allocator.segments()
    ]
