"""memory_stats: every number worked out by hand, and its keys by torch release."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorSettings

MIB = 1 << 20

ARRAY_KEYS = {
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
}
SCALAR_KEYS = {
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
}
OVERSIZE_KEYS = {"oversize_allocations", "oversize_segments"}


def stat(allocator: Allocator, name: str, pool: str = "all") -> tuple[int, int, int, int]:
    """Return current, peak, allocated and freed."""
    numbers = allocator.stats()[name][pool]
    return (numbers["current"], numbers["peak"], numbers["allocated"], numbers["freed"])


@pytest.fixture
def allocator() -> Allocator:
    return Allocator(1 << 34)


@pytest.mark.parametrize(
    ("version", "added"),
    [
        ((2, 6), set()),
        ((2, 11), set()),
        ((2, 12), {"num_oom_rejections"}),
        ((2, 13), {"num_oom_rejections", "reserved_bytes_by_private_pools"}),
        ((2, 15), {"num_oom_rejections", "reserved_bytes_by_private_pools"}),
    ],
)
def test_keys_of_memory_stats_follow_the_release(version: tuple[int, int], added: set[str]) -> None:
    stats = Allocator(1 << 30, version=version).stats()

    assert stats.keys() == ARRAY_KEYS | SCALAR_KEYS | OVERSIZE_KEYS | added
    for key in ARRAY_KEYS:
        assert list(stats[key]) == ["all", "small_pool", "large_pool"]
        assert list(stats[key]["all"]) == ["current", "peak", "allocated", "freed"]
    for key in OVERSIZE_KEYS:
        assert list(stats[key]) == ["current", "peak", "allocated", "freed"]


def test_an_unused_allocator_shows_zeros(allocator: Allocator) -> None:
    stats = allocator.stats()

    assert stats.pop("max_split_size") == -1
    assert set(numbers(stats)) == {0}


def numbers(stats: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for value in stats.values():
        found += numbers(value) if isinstance(value, dict) else [value]
    return found


def test_allocations_count_in_their_pool_and_in_all(allocator: Allocator) -> None:
    small = allocator.malloc(1000)
    allocator.malloc(5 * MIB - 100)
    allocator.free(small)

    assert stat(allocator, "allocation") == (1, 2, 2, 1)
    assert stat(allocator, "allocation", "small_pool") == (0, 1, 1, 1)
    assert stat(allocator, "allocation", "large_pool") == (1, 1, 1, 0)
    assert stat(allocator, "allocated_bytes") == (5 * MIB, 5 * MIB + 1024, 5 * MIB + 1024, 1024)
    assert stat(allocator, "active_bytes") == stat(allocator, "allocated_bytes")
    assert stat(allocator, "active") == stat(allocator, "allocation")
    assert stat(allocator, "requested_bytes") == (5 * MIB - 100, 5 * MIB + 900, 5 * MIB + 900, 1000)
    assert stat(allocator, "requested_bytes", "small_pool") == (0, 1000, 1000, 1000)


def test_peaks_of_the_pools_are_independent_of_the_peak_of_all(allocator: Allocator) -> None:
    small = [allocator.malloc(512) for _ in range(4)]
    for address in small:
        allocator.free(address)
    allocator.malloc(2 * MIB)

    assert stat(allocator, "allocation")[:2] == (1, 4)
    assert stat(allocator, "allocation", "small_pool")[:2] == (0, 4)
    assert stat(allocator, "allocation", "large_pool")[:2] == (1, 1)
    assert stat(allocator, "allocated_bytes")[:2] == (2 * MIB, 2 * MIB)
    assert stat(allocator, "allocated_bytes", "small_pool")[:2] == (0, 2048)


def test_segments_and_device_calls_are_counted(allocator: Allocator) -> None:
    small = allocator.malloc(512)
    large = allocator.malloc(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.empty_cache()
    allocator.malloc(512)

    assert stat(allocator, "segment") == (1, 2, 3, 2)
    assert stat(allocator, "segment", "large_pool") == (0, 1, 1, 1)
    assert stat(allocator, "reserved_bytes") == (2 * MIB, 32 * MIB, 34 * MIB, 32 * MIB)
    stats = allocator.stats()
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (3, 2)
    assert stats["num_sync_all_streams"] == 1


def test_inactive_split_counts_the_free_parts_of_segments_in_use(allocator: Allocator) -> None:
    rest = 2 * MIB

    a = allocator.malloc(1024)  # splits a new segment
    assert stat(allocator, "inactive_split") == (1, 1, 1, 0)
    assert stat(allocator, "inactive_split_bytes") == (rest - 1024, rest - 1024, rest - 1024, 0)

    b = allocator.malloc(2048)  # splits the free part
    assert stat(allocator, "inactive_split") == (1, 1, 1, 0)
    assert stat(allocator, "inactive_split_bytes") == (rest - 3072, rest - 1024, rest - 1024, 2048)

    allocator.free(a)  # between nothing and a live block: one more part
    assert stat(allocator, "inactive_split") == (2, 2, 2, 0)
    assert stat(allocator, "inactive_split_bytes") == (rest - 2048, rest - 1024, rest, 2048)

    a = allocator.malloc(1024)  # uses that part whole
    assert stat(allocator, "inactive_split") == (1, 2, 2, 1)
    assert stat(allocator, "inactive_split_bytes") == (rest - 3072, rest - 1024, rest, 3072)

    allocator.free(b)  # merges with the next part: bytes only
    assert stat(allocator, "inactive_split") == (1, 2, 2, 1)
    assert stat(allocator, "inactive_split_bytes") == (rest - 1024, rest - 1024, rest + 2048, 3072)

    allocator.free(a)  # the segment is whole again: no part is left
    assert stat(allocator, "inactive_split") == (0, 2, 2, 2)
    assert stat(allocator, "inactive_split_bytes") == (0, rest - 1024, rest + 2048, rest + 2048)


def test_filling_a_hole_between_two_parts_joins_them(allocator: Allocator) -> None:
    a, b, c = (allocator.malloc(1024) for _ in range(3))
    allocator.malloc(512)
    allocator.free(a)
    allocator.free(c)
    assert stat(allocator, "inactive_split") == (3, 3, 3, 0)

    allocator.free(b)

    assert stat(allocator, "inactive_split") == (2, 3, 3, 1)
    assert stat(allocator, "inactive_split", "small_pool") == (2, 3, 3, 1)
    assert stat(allocator, "inactive_split", "large_pool") == (0, 0, 0, 0)
    assert stat(allocator, "inactive_split_bytes")[0] == 2 * MIB - 512


def test_a_block_handed_out_whole_counts_whole(allocator: Allocator) -> None:
    allocator.malloc(11 * MIB)

    assert stat(allocator, "allocated_bytes") == (12 * MIB, 12 * MIB, 12 * MIB, 0)
    assert stat(allocator, "requested_bytes") == (11 * MIB, 11 * MIB, 11 * MIB, 0)
    assert stat(allocator, "inactive_split_bytes") == (0, 0, 0, 0)


def test_reset_peaks_starts_from_what_is_held(allocator: Allocator) -> None:
    kept = allocator.malloc(512)
    gone = allocator.malloc(30 * MIB)
    allocator.free(gone)
    allocator.empty_cache()

    allocator.reset_peak_stats()

    assert (allocator.peak_allocated, allocator.peak_reserved) == (512, 2 * MIB)
    assert stat(allocator, "allocation") == (1, 1, 2, 1)
    assert stat(allocator, "active_bytes") == (512, 512, 30 * MIB + 512, 30 * MIB)
    assert stat(allocator, "segment", "large_pool") == (0, 0, 1, 1)
    allocator.free(kept)
    assert stat(allocator, "active_bytes", "small_pool") == (0, 512, 512, 512)


def test_reset_accumulated_keeps_current_and_peak(allocator: Allocator) -> None:
    kept = allocator.malloc(512)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.empty_cache()

    allocator.reset_accumulated_stats()

    assert stat(allocator, "allocation") == (1, 2, 0, 0)
    assert stat(allocator, "allocated_bytes") == (512, 30 * MIB + 512, 0, 0)
    assert allocator.stats()["num_device_alloc"] == 0
    assert allocator.stats()["num_sync_all_streams"] == 0
    allocator.free(kept)
    assert stat(allocator, "allocation") == (0, 2, 0, 1)
    assert stat(allocator, "inactive_split_bytes") == (0, 2 * MIB - 512, 0, 2 * MIB - 512)


def test_oversize_counts_blocks_and_segments_from_max_split_size_on() -> None:
    settings = AllocatorSettings.parse("max_split_size_mb:40")
    allocator = Allocator(1 << 34, settings)

    allocator.malloc(39 * MIB)
    large = allocator.malloc(40 * MIB)
    allocator.free(large)
    allocator.empty_cache()

    stats = allocator.stats()
    assert stats["max_split_size"] == 40 * MIB
    expected = {"current": 0, "peak": 1, "allocated": 1, "freed": 1}
    # 39 MiB comes in a segment of 40, which is handed out whole.
    assert stats["oversize_segments"] == {**expected, "current": 1, "peak": 2, "allocated": 2}
    assert stats["oversize_allocations"] == {**expected, "current": 1, "peak": 2, "allocated": 2}
    allocator.reset_peak_stats()
    allocator.reset_accumulated_stats()
    held = {"current": 1, "peak": 1, "allocated": 0, "freed": 0}
    assert allocator.stats()["oversize_segments"] == held
