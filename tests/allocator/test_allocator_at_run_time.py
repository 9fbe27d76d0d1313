"""Settings that change while memory is held, and settings that limit a request's size."""

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
    """``expandable_segments`` turned on and off: cached segments keep their kind."""

    def test_a_plain_segment_still_serves_requests_after_turning_on(self) -> None:
        allocator = make()
        plain = allocator.malloc(4 * MIB)
        allocator.set_settings("expandable_segments:True")
        # The cached rest of the plain segment serves the next one, and is split freely now.
        assert allocator.malloc(15 * MIB + 512 * 1024) == plain + 4 * MIB
        allocator.malloc(4 * MIB)

        assert actions(allocator) == ["segment_alloc", "alloc", "alloc", "segment_map", "alloc"]
        assert [each["is_expandable"] for each in allocator.segments()] == [False, True]
        assert allocator.stats()["inactive_split_bytes"]["all"]["current"] == 512 * 1024

    def test_mapped_blocks_serve_no_request_after_turning_off(self) -> None:
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

    def test_empty_cache_releases_plain_and_expandable_segments(self) -> None:
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

    def test_a_segment_keeps_the_page_size_it_was_made_with(self) -> None:
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


def test_new_rounding_applies_to_the_next_request() -> None:
    allocator = make()
    assert allocator.block(allocator.malloc(1200)) == 1536
    allocator.set_settings("roundup_power2_divisions:1")
    allocator.malloc(1200)
    allocator.set_settings("roundup_power2_divisions:2")
    assert allocator.block(allocator.malloc(5 * MIB)) == 6 * MIB
    allocator.set_settings("")
    assert allocator.block(allocator.malloc(5 * MIB)) == 5 * MIB


def test_max_split_size_changes_but_its_statistic_does_not() -> None:
    allocator = make()
    allocator.free(allocator.malloc(100 * MIB))
    allocator.set_settings("max_split_size_mb:64")

    allocator.malloc(40 * MIB)

    assert allocator.reserved == 140 * MIB
    assert allocator.stats()["max_split_size"] == -1
    assert make("max_split_size_mb:64").stats()["max_split_size"] == 64 * MIB


def test_ages_count_from_when_garbage_collection_was_turned_on() -> None:
    allocator = make()
    allocator.set_memory_fraction(0.5)
    old = allocator.malloc(100 * MIB)
    young = allocator.malloc(101 * MIB)
    allocator.free(old)
    allocator.set_settings("garbage_collection_threshold:0.7")
    allocator.malloc(200 * MIB)
    allocator.free(young)

    # 401 MiB are above 358.4 MiB; the block that was cached before is the older one.
    allocator.malloc(150 * MIB)

    assert [entry.size for entry in allocator.trace if entry.action == "segment_free"] == [
        100 * MIB
    ]


def test_keys_before_an_invalid_key_take_effect() -> None:
    allocator = make()
    with pytest.raises(SettingsError):
        allocator.set_settings("large_segment_size_mb:32,max_split_size_mb:31")

    allocator.malloc(4 * MIB)
    assert allocator.reserved == 32 * MIB


class TestThrowOnCudaMallocOom:
    """2.12: a request beyond the configured fraction fails before the driver is asked."""

    def test_a_request_is_rejected_before_the_cache_is_emptied(self) -> None:
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

    def test_a_fraction_that_is_in_force_raises_its_own_error_first(self) -> None:
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

    def test_a_request_above_the_reserved_range_is_refused(self) -> None:
        allocator = make("expandable_segments:True,expandable_segments_reserve:0.25")
        allocator.malloc(200 * MIB)
        allocator.malloc(200 * MIB)

        # Ranges of 260 MiB, a quarter of 1 GiB in whole pages of 20 MiB, one for each.
        first, second = (entry.addr for entry in allocator.trace if entry.action == "segment_map")
        assert second - first == 260 * MIB
        with pytest.raises(OutOfMemory):
            allocator.malloc(300 * MIB)
