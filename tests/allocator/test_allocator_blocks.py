"""Which block serves a request: pools, best fit, splitting, merging, streams."""

from __future__ import annotations

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorError, AllocatorSettings

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.fixture
def allocator() -> Allocator:
    return Allocator(total_memory=16 * GIB)


def layout(allocator: Allocator) -> list[tuple[str, list[tuple[int, bool]]]]:
    """Return (pool, [(block size, live)]) of each segment."""
    return [
        (
            segment["segment_type"],
            [(b["size"], b["state"] == "active_allocated") for b in segment["blocks"]],
        )
        for segment in allocator.segments()
    ]


def test_a_small_tensor_takes_a_part_of_a_2_mib_segment(allocator: Allocator) -> None:
    allocator.malloc(1000)

    assert layout(allocator) == [("small", [(1024, True), (2 * MIB - 1024, False)])]
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (1024, 1000, 2 * MIB)


def test_a_medium_tensor_takes_a_part_of_a_20_mib_segment(allocator: Allocator) -> None:
    allocator.malloc(8_519_680)

    assert layout(allocator) == [("large", [(8_519_680, True), (20 * MIB - 8_519_680, False)])]
    assert allocator.reserved == 20 * MIB


def test_a_large_tensor_takes_a_segment_of_its_own(allocator: Allocator) -> None:
    allocator.malloc(40 * MIB)
    allocator.malloc(17_039_360)

    assert layout(allocator) == [
        ("large", [(40 * MIB, True)]),
        ("large", [(17_039_360, True), (18 * MIB - 17_039_360, False)]),
    ]


def test_a_block_with_at_most_1_mib_to_spare_is_handed_out_whole(allocator: Allocator) -> None:
    address = allocator.malloc(11 * MIB)

    assert allocator.block(address) == 12 * MIB
    assert (allocator.allocated, allocator.requested) == (12 * MIB, 11 * MIB)


def test_a_block_with_more_to_spare_is_split(allocator: Allocator) -> None:
    allocator.malloc(11 * MIB - 512)

    assert layout(allocator) == [("large", [(11 * MIB - 512, True), (MIB + 512, False)])]


def test_the_small_pool_splits_down_to_512_bytes(allocator: Allocator) -> None:
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)

    assert layout(allocator) == [("small", [(MIB, True), (MIB - 512, True), (512, False)])]


def test_a_request_just_above_1_mib_is_large(allocator: Allocator) -> None:
    allocator.malloc(MIB + 1)

    assert layout(allocator)[0] == ("large", [(MIB + 512, True), (19 * MIB - 512, False)])


def test_the_smallest_block_that_fits_is_used(allocator: Allocator) -> None:
    sizes = (100 * KIB, 512, 60 * KIB, 512, 80 * KIB, 512)
    addresses = [allocator.malloc(size) for size in sizes]
    for hole in (0, 2, 4):
        allocator.free(addresses[hole])

    assert allocator.malloc(70 * KIB) == addresses[4]
    assert allocator.malloc(50 * KIB) == addresses[2]
    assert allocator.malloc(90 * KIB) == addresses[0]


def test_the_lowest_address_of_equal_blocks_is_used(allocator: Allocator) -> None:
    addresses = [allocator.malloc(size) for size in (4096, 512, 4096, 512, 4096, 512)]
    for hole in (4, 0, 2):
        allocator.free(addresses[hole])

    assert allocator.malloc(4096) == addresses[0]
    assert allocator.malloc(4096) == addresses[2]


def test_a_freed_block_merges_with_both_neighbours(allocator: Allocator) -> None:
    first, middle, last = (allocator.malloc(4096) for _ in range(3))
    guard = allocator.malloc(512)
    allocator.free(first)
    allocator.free(last)
    assert len(layout(allocator)[0][1]) == 5

    allocator.free(middle)

    rest = 2 * MIB - 3 * 4096 - 512
    assert layout(allocator) == [("small", [(3 * 4096, False), (512, True), (rest, False)])]
    allocator.free(guard)
    assert layout(allocator) == [("small", [(2 * MIB, False)])]
    assert allocator.malloc(3 * 4096) == first


def test_neighbouring_segments_do_not_merge(allocator: Allocator) -> None:
    addresses = [allocator.malloc(MIB) for _ in range(4)]
    assert addresses[2] - addresses[1] == MIB

    for address in addresses:
        allocator.free(address)

    assert layout(allocator) == [("small", [(2 * MIB, False)])] * 2


def test_a_cached_block_serves_its_own_stream_alone(allocator: Allocator) -> None:
    first = allocator.malloc(4096, stream=0)
    allocator.free(first)

    other = allocator.malloc(4096, stream=7)

    assert other != first
    assert [segment["stream"] for segment in allocator.segments()] == [0, 7]
    assert allocator.malloc(4096, stream=0) == first


def test_empty_cache_returns_only_segments_without_live_blocks(allocator: Allocator) -> None:
    gone = allocator.malloc(30 * MIB)
    kept = allocator.malloc(4096)
    allocator.free(gone)

    allocator.empty_cache()

    assert layout(allocator) == [("small", [(4096, True), (2 * MIB - 4096, False)])]
    assert allocator.reserved == 2 * MIB
    assert allocator.live_blocks() == {kept: 4096}


def test_segment_addresses_increase_and_are_not_reused(allocator: Allocator) -> None:
    first = allocator.malloc(30 * MIB)
    allocator.free(first)
    allocator.empty_cache()

    second = allocator.malloc(30 * MIB)

    assert first % (2 * MIB) == 0
    assert second == first + 30 * MIB


def test_each_device_has_its_own_address_range() -> None:
    first, second = (Allocator(16 * GIB, device=device).malloc(512) for device in (0, 1))

    assert second - first == 1 << 44


def test_place_segment_decides_the_addresses_of_segments() -> None:
    places = iter((0x20000000, 0x10000000))
    allocator = Allocator(16 * GIB, place_segment=lambda size: next(places))

    assert allocator.malloc(30 * MIB) == 0x20000000
    assert allocator.malloc(40 * MIB) == 0x10000000
    assert [segment["address"] for segment in allocator.segments()] == [0x10000000, 0x20000000]


def test_a_request_of_zero_bytes_allocates_nothing(allocator: Allocator) -> None:
    assert allocator.malloc(0) == 0

    allocator.free(0)

    assert allocator.stats()["allocation"]["all"]["allocated"] == 0
    assert list(allocator.trace) == []


def test_free_memory_excludes_memory_used_elsewhere() -> None:
    allocator = Allocator(total_memory=GIB, used_elsewhere=300 * MIB)
    allocator.malloc(30 * MIB)

    assert allocator.memory.free == GIB - 330 * MIB
    allocator.memory.used_elsewhere = 2 * GIB
    assert allocator.memory.free == 0


def test_freeing_twice_is_an_error(allocator: Allocator) -> None:
    address = allocator.malloc(512)
    allocator.free(address)

    with pytest.raises(AllocatorError) as error:
        allocator.free(address)

    assert str(error.value) == (
        "Address 0x7f0000000000 is not a live block of device 0:"
        " it was never allocated, or it was freed already."
    )
    assert allocator.allocated == 0


def test_an_unknown_address_is_an_error(allocator: Allocator) -> None:
    address = allocator.malloc(1024)

    with pytest.raises(AllocatorError, match=r"0x7f0000000200 is not a live block of device 0"):
        allocator.free(address + 512)
    with pytest.raises(AllocatorError, match="0x1 is not a live block"):
        allocator.block(1)


def test_a_negative_size_is_an_error(allocator: Allocator) -> None:
    with pytest.raises(AllocatorError, match="Cannot allocate -1 bytes"):
        allocator.malloc(-1)


def test_roundup_power2_divisions_round_up_the_block() -> None:
    settings = AllocatorSettings.parse("roundup_power2_divisions:4")
    allocator = Allocator(16 * GIB, settings)

    address = allocator.malloc(33 * MIB)

    assert allocator.block(address) == 40 * MIB
    assert allocator.malloc(0) == 0
    assert allocator.requested == 33 * MIB


@pytest.mark.parametrize(("cached", "reused"), [(70, False), (68, True)])
def test_a_much_larger_oversize_block_is_not_handed_out(cached: int, reused: bool) -> None:
    allocator = Allocator(16 * GIB, AllocatorSettings.parse("max_split_size_mb:30"))
    address = allocator.malloc(cached * MIB)
    allocator.free(address)

    assert (allocator.malloc(50 * MIB) == address) is reused


def test_large_segment_size_mb_sets_the_size_of_20_mib_segments() -> None:
    allocator = Allocator(16 * GIB, AllocatorSettings.parse("large_segment_size_mb:64"))

    allocator.malloc(2 * MIB)

    assert allocator.reserved == 64 * MIB


@pytest.mark.parametrize(
    ("version", "older_first"),
    [((2, 6), False), ((2, 11), False), ((2, 12), True), ((2, 13), True), ((2, 15), True)],
)
def test_since_2_12_the_older_segment_of_equal_blocks_is_used(
    version: tuple[int, int], older_first: bool
) -> None:
    addresses = iter([40 * MIB, 60 * MIB, 10 * MIB])
    allocator = Allocator(
        1 << 30,
        AllocatorSettings(version=version),
        version,
        place_segment=lambda _: next(addresses),
    )
    older = allocator.malloc(12 * MIB)
    allocator.malloc(12 * MIB)
    newer = allocator.malloc(12 * MIB)
    allocator.free(newer)
    allocator.free(older)

    assert (older, newer) == (40 * MIB, 10 * MIB)
    assert allocator.malloc(12 * MIB) == (older if older_first else newer)


@pytest.mark.parametrize(
    ("version", "is_numbered"), [((2, 11), False), ((2, 12), True), ((2, 13), False)]
)
def test_2_12_uses_the_block_that_was_made_first(
    version: tuple[int, int], is_numbered: bool
) -> None:
    allocator = Allocator(1 << 30, AllocatorSettings(version=version), version)
    first, _, third, _ = (allocator.malloc(4 * KIB) for _ in range(4))
    allocator.free(first)
    allocator.free(allocator.malloc(2 * KIB))  # a block of its own, which takes in the rest
    allocator.free(third)

    assert allocator.malloc(4 * KIB) == (third if is_numbered else first)


def test_the_lowest_address_within_a_segment_is_used() -> None:
    for version in ((2, 6), (2, 15)):
        allocator = Allocator(1 << 30, AllocatorSettings(version=version), version)
        blocks = [allocator.malloc(4 * MIB) for _ in range(5)]
        allocator.free(blocks[3])
        allocator.free(blocks[1])

        assert allocator.malloc(4 * MIB) == blocks[1]
