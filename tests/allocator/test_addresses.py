"""Where the driver puts segments: read from a recording on an H100."""

from __future__ import annotations

from pytest_gpumem.allocator.device_memory import DriverAddresses
from pytest_gpumem.sizes import MIB

TOP = 1 << 40


def test_segments_take_ranges_of_32_mib_downwards() -> None:
    place = DriverAddresses(TOP)

    assert [TOP - place(20 * MIB) for _ in range(3)] == [32 * MIB, 64 * MIB, 96 * MIB]
    assert TOP - place(40 * MIB) == (96 + 64) * MIB


def test_segments_fill_the_lowest_free_part_of_a_range_that_fits() -> None:
    place = DriverAddresses(TOP)
    first, second = place(20 * MIB), place(20 * MIB)

    assert place(2 * MIB) == second + 20 * MIB
    assert place(12 * MIB) == first + 20 * MIB
    assert place(2 * MIB) == second + 22 * MIB


def test_a_small_segment_is_placed_behind_a_large_one_in_its_range() -> None:
    place = DriverAddresses(TOP)
    large = place(40 * MIB)

    assert place(16 * MIB) == large + 40 * MIB
    assert place(16 * MIB) == large - 32 * MIB


def test_a_segment_that_fills_its_range_leaves_no_free_part() -> None:
    place = DriverAddresses(TOP)

    assert place(32 * MIB) - place(2 * MIB) == 32 * MIB
