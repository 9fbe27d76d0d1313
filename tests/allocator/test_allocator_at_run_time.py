"""Settings that change while memory is held, and the ways around the cache."""

from __future__ import annotations

import pytest

from pytest_gpumem.allocator import (
    Allocator,
    AllocatorSettings,
    OutOfMemory,
    SettingsError,
)

MIB, GIB = 1 << 20, 1 << 30
Version = tuple[int, int]


def make(conf: str = "", version: Version = (2, 15), total: int = GIB) -> Allocator:
    return Allocator(total, AllocatorSettings.parse(conf, version), version)


def actions(allocator: Allocator) -> list[str]:
    return [entry.action for entry in allocator.trace]


class TestExpandableSegments:
    """Turned on and off: cached memory stays what it is."""

    def test_turned_on_later(self) -> None:
        allocator = make()
        plain = allocator.malloc(4 * MIB)
        allocator.set_settings("expandable_segments:True")
        # The cached rest of the plain segment serves the next one, and is split freely now.
        assert allocator.malloc(15 * MIB + 512 * 1024) == plain + 4 * MIB
        allocator.malloc(4 * MIB)

        assert actions(allocator) == ["segment_alloc", "alloc", "alloc", "segment_map", "alloc"]
        assert [each["is_expandable"] for each in allocator.segments()] == [False, True]
        assert allocator.stats()["inactive_split_bytes"]["all"]["current"] == 512 * 1024

    def test_turned_off_their_blocks_are_passed_over(self) -> None:
        allocator = make("expandable_segments:True")
        mapped = allocator.malloc(4 * MIB)
        allocator.free(mapped)
        allocator.set_settings("expandable_segments:False")

        plain = allocator.malloc(4 * MIB)

        assert plain != mapped
        assert actions(allocator)[-2:] == ["segment_alloc", "alloc"]
        # Of the plain segment 16 MiB are left over; pages do not count as that.
        assert allocator.stats()["inactive_split_bytes"]["all"]["current"] == 16 * MIB
        allocator.set_settings("expandable_segments:True")
        assert allocator.malloc(17 * MIB) == mapped

    def test_both_kinds_are_released(self) -> None:
        allocator = make("expandable_segments:True")
        mapped = allocator.malloc(4 * MIB)
        allocator.set_settings("expandable_segments:False")
        plain = allocator.malloc(4 * MIB)
        allocator.free(plain)
        allocator.free(mapped)

        allocator.empty_cache()

        assert allocator.reserved == 0
        assert actions(allocator)[-2:] == ["segment_free", "segment_unmap"]
        assert allocator.stats()["segment"]["all"]["freed"] == 1

    def test_segments_keep_the_pages_they_were_made_with(self) -> None:
        allocator = make("expandable_segments:True")
        allocator.malloc(4 * MIB)
        allocator.set_settings("large_segment_size_mb:32")
        allocator.malloc(24 * MIB)

        assert [entry.size for entry in allocator.trace if entry.action == "segment_map"] == [
            20 * MIB,
            20 * MIB,
        ]
        other = allocator.malloc(24 * MIB, stream=3)
        assert allocator.trace[-2].size == 32 * MIB
        assert other


def test_rounding_follows_at_once() -> None:
    allocator = make()
    assert allocator.block(allocator.malloc(1200)) == 1536
    allocator.set_settings("roundup_power2_divisions:1")
    allocator.malloc(1200)
    allocator.set_settings("roundup_power2_divisions:2")
    assert allocator.block(allocator.malloc(5 * MIB)) == 6 * MIB
    allocator.set_settings("")
    assert allocator.block(allocator.malloc(5 * MIB)) == 5 * MIB


def test_the_largest_split_follows_and_the_statistic_does_not() -> None:
    allocator = make()
    allocator.free(allocator.malloc(100 * MIB))
    allocator.set_settings("max_split_size_mb:64")

    allocator.malloc(40 * MIB)

    assert allocator.reserved == 140 * MIB
    assert allocator.stats()["max_split_size"] == -1
    assert make("max_split_size_mb:64").stats()["max_split_size"] == 64 * MIB


def test_garbage_collection_counts_ages_from_when_it_was_turned_on() -> None:
    allocator = make()
    allocator.set_memory_fraction(0.5)
    old = allocator.malloc(100 * MIB)
    young = allocator.malloc(101 * MIB)
    allocator.free(old)
    allocator.set_settings("garbage_collection_threshold:0.7")
    allocator.malloc(200 * MIB)
    allocator.free(young)

    # 401 MiB are above 358.4 MiB; what was cached before has been so for longer than the other.
    allocator.malloc(150 * MIB)

    assert [entry.size for entry in allocator.trace if entry.action == "segment_free"] == [
        100 * MIB
    ]


def test_what_was_read_before_an_error_holds() -> None:
    allocator = make()
    with pytest.raises(SettingsError):
        allocator.set_settings("large_segment_size_mb:32,max_split_size_mb:31")

    allocator.malloc(4 * MIB)
    assert allocator.reserved == 32 * MIB


class TestThrowOnCudaMallocOom:
    """2.12: a request beyond the configured fraction fails before the driver is asked."""

    def test_the_request_is_rejected_at_once(self) -> None:
        allocator = make("throw_on_cudamalloc_oom:True")
        allocator.free(allocator.malloc(600 * MIB))
        allocator.malloc(100 * MIB, stream=3)

        with pytest.raises(OutOfMemory) as error:
            allocator.malloc(700 * MIB - 100)

        assert str(error.value) == (
            "CUDA out of memory. Allocation was preemptively rejected because it would exceed"
            " per_process_memory_fraction limit. Requested size: 700.00 MiB"
        )
        stats = allocator.stats()
        assert (stats["num_oom_rejections"], stats["num_ooms"]) == (1, 0)
        # No cached block was released for it, and no event recorded.
        assert allocator.reserved == 700 * MIB
        assert actions(allocator)[-1] == "alloc"

    def test_the_armed_fraction_comes_first(self) -> None:
        allocator = make("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5")

        with pytest.raises(OutOfMemory, match=r"512\.00 MiB allowed"):
            allocator.malloc(600 * MIB)
        assert allocator.stats()["num_oom_rejections"] == 0

    def test_a_fraction_set_later_is_read_at_every_request(self) -> None:
        allocator = make("throw_on_cudamalloc_oom:True")
        allocator.set_settings("per_process_memory_fraction:0.25")

        with pytest.raises(OutOfMemory, match="preemptively rejected"):
            allocator.malloc(300 * MIB)
        allocator.malloc(200 * MIB)

    def test_the_statistic_exists_since_2_12(self) -> None:
        assert "num_oom_rejections" not in make(version=(2, 11)).stats()


class TestAddressSpace:
    """2.15: less address space for an expandable segment than the device has memory."""

    def test_a_request_must_fit_into_one_segment(self) -> None:
        allocator = make("expandable_segments:True,expandable_segments_reserve:0.25")
        allocator.malloc(200 * MIB)
        allocator.malloc(200 * MIB)

        # Ranges of 260 MiB, a quarter of 1 GiB in whole pages of 20 MiB, one for each.
        first, second = (entry.addr for entry in allocator.trace if entry.action == "segment_map")
        assert second - first == 260 * MIB
        with pytest.raises(OutOfMemory):
            allocator.malloc(300 * MIB)
