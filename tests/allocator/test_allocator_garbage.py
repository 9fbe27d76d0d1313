"""garbage_collection_threshold: which cached segments are released for new ones."""

from __future__ import annotations

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorSettings

MIB = 1 << 20


def collecting(conf: str = "garbage_collection_threshold:0.6") -> Allocator:
    """Return an allocator with a limit of 400 MiB: 0.6 of it are 240 MiB."""
    allocator = Allocator(800 * MIB, AllocatorSettings.parse(conf))
    allocator.set_memory_fraction(0.5)
    return allocator


def three_ages(allocator: Allocator) -> list[int]:
    """Free three 40 MiB segments beside 130 MiB in use; a search between frees ages the cached."""
    old = [allocator.malloc(40 * MIB) for _ in range(3)]
    allocator.free(old[0])
    allocator.malloc(60 * MIB)
    allocator.free(old[1])
    allocator.malloc(70 * MIB)
    allocator.free(old[2])
    return old


def test_segments_of_at_least_mean_age_are_released() -> None:
    allocator = collecting()
    old = three_ages(allocator)
    assert allocator.reserved == 250 * MIB
    before = len(allocator.trace)

    new = allocator.malloc(50 * MIB)

    # Ages 3, 2 and 1: the mean is 2.
    assert [entry[:2] for entry in allocator.trace[before:]] == [
        ("segment_free", old[0]),
        ("segment_free", old[1]),
        ("segment_alloc", new),
        ("alloc", new),
    ]
    assert allocator.reserved == 220 * MIB


def test_rounds_repeat_until_the_target_is_reclaimed() -> None:
    allocator = collecting("garbage_collection_threshold:0.4")
    allocator.set_memory_fraction(0.9)
    old = three_ages(allocator)
    assert allocator.reserved == 250 * MIB
    allocator.set_memory_fraction(0.5)

    allocator.malloc(50 * MIB)

    # 250 MiB are 90 above 0.4 × 400; the first round yields 80, so that a second one follows.
    released = [entry.addr for entry in allocator.trace if entry.action == "segment_free"]
    assert released == old


def test_nothing_is_released_below_the_threshold() -> None:
    allocator = collecting("garbage_collection_threshold:0.7")
    three_ages(allocator)

    allocator.malloc(50 * MIB)

    assert allocator.reserved == 300 * MIB


def test_a_request_that_the_cache_serves_releases_nothing() -> None:
    allocator = collecting()
    three_ages(allocator)

    allocator.malloc(40 * MIB)

    assert allocator.reserved == 250 * MIB


def test_garbage_collection_is_off_without_a_memory_fraction() -> None:
    settings = AllocatorSettings.parse("garbage_collection_threshold:0.1")
    allocator = Allocator(300 * MIB, settings)
    three_ages(allocator)

    allocator.malloc(50 * MIB)

    assert allocator.reserved == 300 * MIB


def test_small_segments_and_segments_in_use_are_kept() -> None:
    allocator = collecting("garbage_collection_threshold:0.1")
    small = allocator.malloc(512)
    allocator.free(small)
    used = [allocator.malloc(2 * MIB) for _ in range(2)]
    allocator.free(used[0])
    for size in (60, 70):
        allocator.malloc(size * MIB)

    assert all(entry.action != "segment_free" for entry in allocator.trace)


@pytest.mark.parametrize("threshold", ["0.6", "0.4"])
def test_statistics_count_collected_memory(threshold: str) -> None:
    allocator = collecting(f"garbage_collection_threshold:{threshold}")
    three_ages(allocator)
    allocator.malloc(50 * MIB)

    held = sum(segment["total_size"] for segment in allocator.segments())
    assert allocator.reserved == held
    frees = sum(entry.action == "segment_free" for entry in allocator.trace)
    assert allocator.stats()["num_device_free"] == frees
