"""Admission of tests to a device, computed by hand."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.sharing.admission import (
    PATIENCE,
    Budget,
    Request,
    admissible,
    must_tear_down,
    to_yield,
)

GPU = "gpu"


def request(id: int, need: int, **more: Any) -> Request:
    return Request(id=id, owner=id, needs={GPU: need}, **{"since": 0.0, **more})


def admitted(
    waiting: list[Request], running: list[Request] | None = None, now: float = 0.0, **device: Any
) -> list[int]:
    devices = {GPU: Budget(**{"capacity": 100, **device})}
    return [one.id for one in admissible(waiting, running or [], devices, now)]


def test_tests_that_fit_together_run_together() -> None:
    assert admitted([request(1, 60), request(2, 40)]) == [1, 2]
    assert admitted([request(1, 60), request(2, 41)]) == [1]


def test_contexts_fixtures_and_other_programs_take_memory() -> None:
    assert admitted([request(1, 70)], contexts={8: 10}, fixtures={9: 15}, foreign=5) == [1]
    assert admitted([request(1, 71)], contexts={8: 10}, fixtures={9: 15}, foreign=5) == []


def test_an_exclusive_test_runs_alone() -> None:
    alone = request(1, 0, exclusive=True)
    assert admitted([alone], [request(9, 1)]) == []
    assert admitted([request(2, 1)], [alone]) == []
    assert admitted([alone, request(2, 1)]) == [1]


def test_a_test_does_not_wait_for_other_devices() -> None:
    elsewhere = Request(id=2, owner=2, needs={"other": 100}, since=0.0)
    devices = {GPU: Budget(100), "other": Budget(100)}
    running = [request(9, 100)]
    assert admissible([request(1, 1), elsewhere], running, devices, 0.0) == [elsewhere]


def test_a_test_of_two_devices_gets_both_or_none() -> None:
    both = Request(id=1, owner=1, needs={GPU: 50, "other": 50}, since=0.0)
    devices = {GPU: Budget(100), "other": Budget(40)}
    assert admissible([both], [], devices, 0.0) == []


def test_a_test_waits_for_a_device_of_unknown_capacity() -> None:
    assert admissible([request(1, 1)], [], {}, 0.0) == []


class TestBackfilling:
    """A test of 80 of 100 bytes runs until 10 s; one of 60 waits at the head of the queue."""

    running = (request(9, 80, duration=10.0),)
    head = request(1, 60)

    def test_a_test_that_ends_in_time_passes_the_head(self) -> None:
        assert admitted([self.head, request(2, 20, duration=10.0)], [*self.running]) == [2]

    def test_a_test_that_would_delay_the_head_does_not_pass(self) -> None:
        # At 10 s, 100 bytes are free: for the 60, and 40 beside them.
        assert admitted([self.head, request(2, 20, duration=11.0)], [*self.running]) == [2]
        bigger = request(1, 90)
        assert admitted([bigger, request(2, 20, duration=11.0)], [*self.running]) == []

    def test_a_test_of_unknown_duration_passes_only_beside_the_head(self) -> None:
        assert admitted([self.head, request(2, 20)], [*self.running]) == [2]
        assert admitted([request(1, 90), request(2, 20)], [*self.running]) == []

    def test_no_test_passes_where_the_end_of_a_running_one_is_unknown(self) -> None:
        endless = [request(9, 80)]
        assert admitted([request(1, 90), request(2, 20, duration=0.1)], endless) == []

    def test_a_running_test_that_is_late_may_end_at_any_moment(self) -> None:
        late = [request(9, 80, duration=10.0)]
        waiting = [request(1, 90), request(2, 20, duration=0.1)]
        assert admitted(waiting, late, now=5.0) == [2]
        assert admitted(waiting, late, now=10.0) == []

    def test_the_second_in_the_queue_keeps_its_place_too(self) -> None:
        # The 20 fit beside the 60, for which 80 have to end first, and not beside the 90.
        late = request(3, 20, duration=11.0)
        assert admitted([self.head, request(2, 90), late], [*self.running]) == []
        alone = request(2, 0, exclusive=True)
        assert admitted([self.head, alone, late], [*self.running]) == []
        assert admitted([self.head, alone, request(3, 20, duration=10.0)], [*self.running]) == [3]

    def test_tests_that_passed_count_while_the_start_of_the_head_is_unknown(self) -> None:
        endless = request(1, 50)
        passed = request(3, 30, duration=5.0)
        # 60 + 30 + 20: the head would wait for one of the two later tests.
        assert admitted([request(2, 60), request(4, 20)], [endless, passed]) == []
        assert admitted([request(2, 60), request(4, 10)], [endless, passed]) == [4]

    def test_fixtures_that_will_be_torn_down_delay_no_test(self) -> None:
        # Without the 30 of worker 7 the head could start at once, so a test that ends before the
        # 40 gains nothing; one of 10 fits beside both.
        running = [request(9, 40, duration=10.0)]
        waiting = [request(1, 50), request(2, 10, duration=5.0)]
        assert admitted(waiting, running, fixtures={7: 30}) == [2]
        waiting = [request(1, 50), request(2, 20, duration=5.0)]
        assert admitted(waiting, running, fixtures={7: 30}) == []

    def test_a_test_that_waits_for_another_program_delays_no_test(self) -> None:
        assert admitted([request(1, 60), request(2, 30)], foreign=60) == [2]


def test_priority_and_guarantee_come_first_until_other_tests_waited() -> None:
    late = request(3, 100, since=0.0)
    first = request(4, 100, priority=2, since=200.0)
    opportunistic = request(1, 100, guaranteed=False, since=200.0)
    assert admitted([opportunistic, first], now=200.0) == [4]
    assert admitted([late, first], now=PATIENCE * 2 - 1) == [4]
    assert admitted([late, first], now=PATIENCE * 4) == [3]


def test_fixtures_of_waiting_workers_are_torn_down() -> None:
    devices = {GPU: Budget(100, fixtures={1: 50, 2: 30})}
    waiting = [request(1, 40), request(2, 40)]
    # 20 are free. The first needs 40 above the 50 that it holds, so the other's 30 are torn down.
    assert admissible(waiting, [], devices, 0.0) == []
    assert must_tear_down(waiting, [], devices, 0.0) == {2}


def test_fixtures_are_kept_where_running_tests_take_the_room() -> None:
    devices = {GPU: Budget(100, fixtures={2: 10})}
    assert must_tear_down([request(1, 40)], [request(9, 80)], devices, 0.0) == frozenset()


def test_fixtures_are_torn_down_where_running_tests_leave_room() -> None:
    # 50 run, and 40 have room beside them without the 20 of worker 2; those of 9 have to stay.
    devices = {GPU: Budget(100, fixtures={2: 20, 9: 5})}
    waiting = [request(1, 40), request(2, 0)]
    assert must_tear_down(waiting, [request(9, 50)], devices, 0.0) == {2}
    assert must_tear_down(waiting, [request(9, 56)], devices, 0.0) == frozenset()


class TestYielding:
    """Three opportunistic tests run on 100 bytes; the latest has the least work to lose."""

    running = (
        request(1, 30, since=1.0, guaranteed=False),
        request(2, 20, since=2.0, guaranteed=False),
        request(3, 40, since=3.0, guaranteed=False),
    )

    def yielding(self, *waiting: Request, also: tuple[Request, ...] = ()) -> list[int]:
        devices = {GPU: Budget(100)}
        return sorted(to_yield(waiting, [*self.running, *also], devices, 4.0))

    def test_the_latest_test_yields(self) -> None:
        assert self.yielding(request(9, 50)) == [3]

    def test_no_more_tests_than_necessary_yield(self) -> None:
        # 3 and 2 come first; 65 need 1 beside 3 alone.
        assert self.yielding(request(9, 65)) == [2, 3]
        assert self.yielding(request(9, 75)) == [1, 3]

    def test_no_test_yields_where_there_is_room(self) -> None:
        assert self.yielding(request(9, 10)) == []

    def test_no_test_yields_where_fixtures_of_waiting_workers_suffice(self) -> None:
        devices = {GPU: Budget(100, fixtures={8: 10})}
        waiting = [request(7, 10), request(8, 0)]
        assert not to_yield(waiting, [*self.running], devices, 4.0)
        # 11 need one of the tests, too.
        waiting = [request(7, 11), request(8, 0)]
        assert to_yield(waiting, [*self.running], devices, 4.0) == {3}

    def test_fixtures_of_a_yielding_worker_are_freed_with_its_test(self) -> None:
        devices = {GPU: Budget(100, fixtures={1: 50})}
        running = [request(1, 10, guaranteed=False)]
        assert to_yield([request(9, 100)], running, devices, 4.0) == {1}

    def test_no_test_yields_to_one_that_would_not_fit_even_then(self) -> None:
        devices = {GPU: Budget(100)}
        running = [*self.running[:2], request(5, 50)]
        assert not to_yield([request(9, 60)], running, devices, 4.0)

    def test_no_test_yields_to_an_opportunistic_test(self) -> None:
        assert self.yielding(request(9, 50, guaranteed=False)) == []

    def test_guaranteed_tests_do_not_yield(self) -> None:
        devices = {GPU: Budget(100)}
        assert not to_yield([request(9, 50)], [request(1, 60)], devices, 4.0)
