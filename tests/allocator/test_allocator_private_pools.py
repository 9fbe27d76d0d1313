"""Private pools: which requests allocate from them, and when their memory is released."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.allocator import (
    Allocator,
    AllocatorError,
    AllocatorSettings,
    OutOfMemory,
)

MIB, GIB = 1 << 20, 1 << 30
POOL, ANOTHER = (0, 1), (0, 2)
Version = tuple[int, int]


def any_stream(stream: int) -> bool:
    return True


def with_pool(version: Version = (2, 13), conf: str = "", **options: bool) -> Allocator:
    allocator = Allocator(GIB, AllocatorSettings.parse(conf, version), version)
    allocator.pools.create(POOL, **options)
    return allocator


def in_pool(allocator: Allocator, size: int, pool: tuple[int, int] = POOL) -> int:
    allocator.begin_allocate_to_pool(pool, any_stream)
    address = allocator.malloc(size)
    allocator.end_allocate_to_pool(pool)
    allocator.pools.release(pool)
    return address


def pools(allocator: Allocator) -> list[tuple[Any, int]]:
    return [(each["segment_pool_id"], each["total_size"]) for each in allocator.segments()]


def test_a_scope_sends_allocations_to_its_pool() -> None:
    allocator = with_pool()
    allocator.malloc(4 * MIB)
    in_pool(allocator, 4 * MIB)
    in_pool(allocator, 512)
    allocator.malloc(4 * MIB)

    assert pools(allocator) == [((0, 0), 20 * MIB), (POOL, 20 * MIB), (POOL, 2 * MIB)]
    assert allocator.allocated == 12 * MIB + 512


def test_the_filter_decides_by_stream() -> None:
    allocator = with_pool()
    allocator.begin_allocate_to_pool(POOL, lambda stream: stream == 3)
    allocator.malloc(4 * MIB, stream=0)
    allocator.malloc(4 * MIB, stream=3)

    assert pools(allocator) == [((0, 0), 20 * MIB), (POOL, 20 * MIB)]


@pytest.mark.parametrize(
    ("version", "chosen"), [((2, 6), POOL), ((2, 9), POOL), ((2, 10), ANOTHER), ((2, 15), ANOTHER)]
)
def test_the_outer_of_two_scopes_wins_up_to_2_9(version: Version, chosen: Any) -> None:
    allocator = with_pool(version)
    allocator.begin_allocate_to_pool(POOL, any_stream)
    allocator.begin_allocate_to_pool(ANOTHER, any_stream)
    allocator.malloc(4 * MIB)

    assert pools(allocator) == [(chosen, 20 * MIB)]


def test_blocks_of_a_pool_are_reused_inside_its_scope_alone() -> None:
    allocator = with_pool()
    address = in_pool(allocator, 4 * MIB)
    allocator.free(address)

    assert allocator.malloc(4 * MIB) != address
    assert in_pool(allocator, 4 * MIB) == address


def test_events_name_their_pool() -> None:
    allocator = with_pool((2, 12))
    allocator.free(in_pool(allocator, 4 * MIB))
    allocator.malloc(512)

    assert [(entry.action, entry.pool_id) for entry in allocator.trace] == [
        ("segment_alloc", POOL),
        ("alloc", POOL),
        ("free_requested", POOL),
        ("free_completed", POOL),
        ("segment_alloc", (0, 0)),
        ("alloc", (0, 0)),
    ]
    trace = allocator.snapshot()["device_traces"][0]
    assert [entry["pool_id"] for entry in trace[:2]] == [POOL, POOL]
    assert type(trace[0]["stream"]) is int


def test_memory_of_a_pool_in_use_is_not_released() -> None:
    allocator = with_pool()
    allocator.free(in_pool(allocator, 4 * MIB))

    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB

    allocator.pools.release(POOL)
    assert allocator.reserved == 20 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 0
    with pytest.raises(AllocatorError, match="Could not find pool"):
        allocator.pools.get(POOL)


def test_a_released_pool_keeps_its_live_blocks() -> None:
    allocator = with_pool()
    address = in_pool(allocator, 4 * MIB)
    allocator.pools.release(POOL)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    with pytest.raises(AllocatorError, match="was given up"):
        allocator.pools.create(POOL)

    allocator.free(address)
    allocator.empty_cache()

    assert allocator.reserved == 0
    allocator.pools.create(POOL)
    assert allocator.pools.get(POOL).uses == 1


def test_the_cache_of_one_pool_is_emptied_alone() -> None:
    allocator = with_pool()
    allocator.pools.create(ANOTHER)
    for pool in (POOL, ANOTHER):
        allocator.free(in_pool(allocator, 4 * MIB, pool))
        allocator.pools.release(pool)
    allocator.free(allocator.malloc(4 * MIB))
    syncs = allocator.stats()["num_sync_all_streams"]

    allocator.empty_cache(POOL)

    assert pools(allocator) == [(ANOTHER, 20 * MIB), ((0, 0), 20 * MIB)]
    assert allocator.stats()["num_sync_all_streams"] == syncs + 1


def test_a_snapshot_may_be_of_one_pool() -> None:
    allocator = with_pool()
    in_pool(allocator, 4 * MIB)
    allocator.malloc(4 * MIB)

    assert [each["segment_pool_id"] for each in allocator.segments(POOL)] == [POOL]


def test_a_scope_cannot_be_opened_or_closed_twice() -> None:
    allocator = with_pool()
    allocator.begin_allocate_to_pool(POOL, any_stream)
    with pytest.raises(AllocatorError, match="beginAllocateToPool: already recording"):
        allocator.begin_allocate_to_pool(POOL, any_stream)
    allocator.end_allocate_to_pool(POOL)
    with pytest.raises(AllocatorError, match="endAllocatePool: not currently recording"):
        allocator.end_allocate_to_pool(POOL)


def test_a_pool_counts_its_uses() -> None:
    allocator = with_pool()
    assert allocator.pools.get(POOL).uses == 1
    allocator.begin_allocate_to_pool(POOL, any_stream)
    assert allocator.pools.get(POOL).uses == 2
    allocator.end_allocate_to_pool(POOL)
    allocator.pools.release(POOL)
    assert allocator.pools.get(POOL).uses == 1


def test_reserved_bytes_of_each_pool_since_2_13() -> None:
    allocator = with_pool()
    address = in_pool(allocator, 4 * MIB)
    in_pool(allocator, 512)

    stats = allocator.stats()["reserved_bytes_by_private_pools"]
    assert list(stats) == [POOL]
    assert stats[POOL]["all"] == {
        "current": 22 * MIB,
        "peak": 22 * MIB,
        "allocated": 22 * MIB,
        "freed": 0,
    }
    assert stats[POOL]["small_pool"]["current"] == 2 * MIB
    assert stats[POOL]["large_pool"]["current"] == 20 * MIB

    # The statistics outlive the pool.
    allocator.free(address)
    allocator.pools.release(POOL)
    allocator.empty_cache()
    allocator.reset_peak_stats()
    stats = allocator.stats()["reserved_bytes_by_private_pools"]
    assert stats[POOL]["large_pool"] == {
        "current": 0,
        "peak": 0,
        "allocated": 20 * MIB,
        "freed": 20 * MIB,
    }
    assert "reserved_bytes_by_private_pools" not in with_pool((2, 12)).stats()


def test_private_pools_count_in_the_statistics_of_the_device() -> None:
    allocator = with_pool()
    in_pool(allocator, 4 * MIB)

    stats = allocator.stats()
    assert stats["allocated_bytes"]["large_pool"]["current"] == 4 * MIB
    assert stats["segment"]["all"]["current"] == 1
    assert stats["inactive_split_bytes"]["all"]["current"] == 16 * MIB


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_pool_may_refuse_to_split(conf: str) -> None:
    allocator = with_pool(conf=conf, no_split=True)
    address = in_pool(allocator, 4 * MIB)

    assert allocator.block(address) == 20 * MIB
    assert allocator.block(allocator.malloc(4 * MIB)) == 4 * MIB


def test_private_pools_have_expandable_segments_too() -> None:
    allocator = with_pool(conf="expandable_segments:True")
    address = in_pool(allocator, 4 * MIB)
    allocator.malloc(4 * MIB)

    assert [entry.action for entry in allocator.trace].count("segment_map") == 2
    assert pools(allocator) == [(POOL, 20 * MIB), ((0, 0), 20 * MIB)]
    allocator.free(address)
    allocator.pools.release(POOL)
    allocator.empty_cache()
    assert pools(allocator) == [((0, 0), 20 * MIB)]


class TestUseOnOom:
    """A pool that lends its free blocks when the device is full."""

    def almost_full(self, version: Version, conf: str = "") -> tuple[Allocator, int]:
        """350 MiB cached in the pool, 400 MiB of which 280 are in use, 274 MiB on the device."""
        allocator = with_pool(version, conf, use_on_oom=True)
        lent = in_pool(allocator, 350 * MIB)
        allocator.free(lent)
        allocator.free(allocator.malloc(400 * MIB))
        allocator.malloc(280 * MIB)
        return allocator, lent

    def test_since_2_11_the_pool_lends_before_the_cache_is_emptied(self) -> None:
        allocator, lent = self.almost_full((2, 11))

        assert allocator.malloc(300 * MIB) == lent
        assert allocator.stats()["num_alloc_retries"] == 0

    @pytest.mark.parametrize("version", [(2, 8), (2, 10)])
    def test_before_2_11_the_pool_lends_after_the_cache_was_emptied(self, version: Version) -> None:
        allocator, lent = self.almost_full(version)

        assert allocator.malloc(300 * MIB) == lent
        assert allocator.stats()["num_alloc_retries"] == 1

    def test_up_to_2_7_no_pool_lends(self) -> None:
        allocator, _ = self.almost_full((2, 7))

        with pytest.raises(OutOfMemory):
            allocator.malloc(300 * MIB)

    def test_a_lent_block_belongs_to_its_pool(self) -> None:
        allocator, lent = self.almost_full((2, 13))
        address = allocator.malloc(300 * MIB)

        assert allocator.trace[-1].pool_id == POOL
        # The block is split as always: the rest stays in the pool.
        assert allocator.block(address) == 300 * MIB
        assert in_pool(allocator, 50 * MIB) == lent + 300 * MIB

    def test_a_pool_stops_lending_when_use_on_oom_is_turned_off(self) -> None:
        allocator, _ = self.almost_full((2, 13))
        allocator.pools.get(POOL).use_on_oom = False

        with pytest.raises(OutOfMemory):
            allocator.malloc(300 * MIB)


def test_the_message_names_what_is_free_in_private_pools() -> None:
    allocator = with_pool()
    allocator.free(in_pool(allocator, 300 * MIB))
    allocator.malloc(600 * MIB)

    with pytest.raises(OutOfMemory, match=r"with 300\.00 MiB allocated in private pools") as error:
        allocator.malloc(200 * MIB)
    assert "Of the allocated memory 900.00 MiB is allocated by PyTorch" in str(error.value)


def test_a_state_with_private_pools_can_be_restored() -> None:
    recorded = with_pool()
    in_pool(recorded, 4 * MIB)
    recorded.malloc(4 * MIB)
    restored = Allocator(GIB)

    restored.restore(recorded.segments())

    assert restored.segments() == recorded.segments()
