"""Which test comes next."""

from __future__ import annotations

from pytest_gpumem.sharing.need import NO_MEMORY, Need
from pytest_gpumem.sharing.order import next_test


def need(size: int | None, duration: float | None = None, **more: bool | int) -> Need:
    return Need(size, "max", duration, **more)  # type: ignore[arg-type]  # each by its own type


def test_the_largest_that_fits_beside_the_others() -> None:
    pending = [need(10), need(60), need(40), need(41)]
    assert next_test(pending, [need(60)], 100) == 2


def test_long_ones_count_by_what_they_take_of_device_and_time() -> None:
    assert next_test([need(40, 1.0), need(10, 5.0)], [], 100) == 1


def test_where_nothing_fits_what_needs_least() -> None:
    assert next_test([need(90), need(50), need(70)], [need(60)], 100) == 1


def test_tests_without_memory_fill_the_gaps() -> None:
    assert next_test([need(90), NO_MEMORY], [need(60)], 100) == 1
    assert next_test([need(30), NO_MEMORY], [need(60)], 100) == 0


def test_who_runs_alone_comes_where_there_is_room_for_all_of_it() -> None:
    alone = need(1, exclusive=True)
    assert next_test([alone, need(10)], [need(1)], 100) == 1
    assert next_test([need(None), need(10)], [], 100) == 0


def test_priority_first_and_opportunistic_ones_last() -> None:
    assert next_test([need(50), need(10, priority=1)], [], 100) == 1
    assert next_test([need(50, guaranteed=False), need(10)], [], 100) == 1
