"""Plans of the machines that a suite needs, worked out by hand."""

from __future__ import annotations

import pytest

from pytest_gpumem.prediction.runners import (
    Plan,
    PlannedTest,
    Rental,
    make_plan,
    parse_runner,
)
from pytest_gpumem.sizes import GIB, MIB

T4, L4, H100 = map(parse_runner, ["T4:0.36", "L4:0.72", "H100:3.60"])
"""A hundredth of a cent, two and ten for each second."""


def test_a_runners_memory_excludes_driver_and_context() -> None:
    # 15,835,660,288 B less 2 % and 600 MiB.
    assert T4.memory == round(15_835_660_288 * 0.98) - 600 * MIB


def test_memory_that_must_stay_free_is_not_available() -> None:
    # A T4 has 14.75 GiB.
    assert known("a", 13.8).obstacle(T4) == ""
    assert known("a", 14.5).obstacle(T4) == "needs 14.50 GiB"


def known(name: str, gib: float, seconds: float | None = None, **more: object) -> PlannedTest:
    runners = ("T4", "L4", "H100")
    return PlannedTest(
        name,
        dict.fromkeys(runners, int(gib * GIB)),
        {} if seconds is None else dict.fromkeys(runners, seconds),
        **more,  # type: ignore[arg-type]  # fields of several types
    )


def by_runner(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(job.runner.name, job.tests) for job in plan.jobs]


SUITE = [known("a", 1, 100), known("b", 13, 200), known("c", 16, 50), known("d", 70, 10)]


def test_each_test_runs_on_the_cheapest_runner_that_it_fits() -> None:
    plan = make_plan(SUITE, [T4, L4, H100])
    assert by_runner(plan) == [("T4", ("a", "b")), ("L4", ("c",)), ("H100", ("d",))]
    assert [plan.fitting(runner) for runner in plan.runners] == [2, 3, 4]
    assert plan.seconds == 300
    # 300 s of 0.0001, 50 of 0.0002 and 10 of 0.001.
    assert plan.cost == pytest.approx(0.03 + 0.01 + 0.01)


def test_a_larger_runner_may_be_the_cheaper_one() -> None:
    plan = make_plan(SUITE, [T4, parse_runner("H100:0.10")])
    assert by_runner(plan) == [("H100", ("a", "b", "c", "d"))]


def test_a_faster_runner_may_be_the_cheaper_one() -> None:
    fast = PlannedTest("a", {"T4": 1, "H100": 1}, {"T4": 100, "H100": 9})
    assert by_runner(make_plan([fast], [T4, H100])) == [("H100", ("a",))]


def test_a_runner_whose_start_costs_more_than_it_saves_is_left_out() -> None:
    # c on an L4: 50 + 60 s of 0.0002 are 0.022; on the H100 that runs anyway 50 s of 0.001, 0.05.
    assert [name for name, _ in by_runner(make_plan(SUITE, [T4, L4, H100], startup=60))] == [
        *("T4", "L4", "H100")
    ]
    # With 240 s of start it is 0.058.
    assert by_runner(make_plan(SUITE, [T4, L4, H100], startup=240)) == [
        ("T4", ("a", "b")),
        ("H100", ("c", "d")),
    ]


def test_a_time_limit_decides_the_number_of_machines() -> None:
    tests = [known(name, 1, 100) for name in "abcde"]
    plan = make_plan(tests, [T4], limit=200)
    assert [job.seconds for job in plan.jobs] == [200, 200, 100]
    assert sorted(name for job in plan.jobs for name in job.tests) == list("abcde")
    # 60 s of start leave time for one test each.
    plan = make_plan(tests, [T4], limit=200, startup=60)
    assert [job.seconds for job in plan.jobs] == [160] * 5
    assert plan.cost == pytest.approx(800 * 0.0001)
    assert not plan.late


def test_a_test_that_exceeds_the_time_limit_is_named() -> None:
    plan = make_plan([known("a", 1, 300), known("b", 1, 60), known("c", 1, 60)], [T4], limit=120)
    assert by_runner(plan) == [("T4", ("a",)), ("T4", ("b", "c"))]
    assert plan.late == ("a",)


def test_tests_of_zero_duration_are_planned() -> None:
    plan = make_plan([known("a", 1, 0.0), known("b", 1, 0.0)], [T4], limit=60)
    assert by_runner(plan) == [("T4", ("a", "b"))]


def test_a_test_of_unknown_duration_counts_with_the_average() -> None:
    plan = make_plan([known("a", 1, 100), known("b", 1, 200), known("c", 1)], [T4])
    assert plan.seconds == 450


def test_a_plan_without_durations_has_no_cost() -> None:
    plan = make_plan([known("a", 1), known("b", 16)], [T4, L4])
    assert by_runner(plan) == [("T4", ("a",)), ("L4", ("b",))]
    assert plan.cost is None
    assert plan.seconds is None
    with pytest.raises(ValueError, match="no test's duration is known"):
        make_plan([known("a", 1)], [T4], limit=60)


def test_a_test_that_fits_nowhere_is_named_and_the_others_planned() -> None:
    plan = make_plan([*SUITE, known("e", 80, 10)], [T4, L4, H100])
    assert [test.nodeid for test in plan.nowhere] == ["e"]
    assert by_runner(plan) == by_runner(make_plan(SUITE, [T4, L4, H100]))


def test_a_test_that_a_runner_refuses_is_planned_elsewhere() -> None:
    fp8 = known("a", 1, 10, refusals={"T4": "fp8 needs compute capability 8.9"})
    plan = make_plan([fp8], [T4, L4])
    assert by_runner(plan) == [("L4", ("a",))]
    assert fp8.obstacle(T4) == "fp8 needs compute capability 8.9"


def test_a_test_without_a_prediction_runs_on_the_largest_runner() -> None:
    plan = make_plan([known("a", 1, 10), PlannedTest("b", problem="it failed")], [T4, H100])
    assert by_runner(plan) == [("T4", ("a",)), ("H100", ("b",))]
    assert plan.fitting(H100) == 1


def test_the_shards_name_every_test_once() -> None:
    plan = make_plan(SUITE, [T4, L4, H100], limit=240)
    data = plan.shards()
    assert data["matrix"]["include"] == [
        {"runner": "T4", "shard": "1/4", "tests": 1, "minutes": 3.33},
        {"runner": "T4", "shard": "2/4", "tests": 1, "minutes": 1.67},
        {"runner": "L4", "shard": "3/4", "tests": 1, "minutes": 0.83},
        {"runner": "H100", "shard": "4/4", "tests": 1, "minutes": 0.17},
    ]
    assert [shard["tests"] for shard in data["shards"]] == [["b"], ["a"], ["c"], ["d"]]
    assert data["seconds"] == {"a": 100, "b": 200, "c": 50, "d": 10}
    assert data["bytes"]["d"] == 70 * GIB


@pytest.mark.parametrize("text", ["T4", "T4:", "T4:x", "T4:-1", "T4:nan", "T4:1e9", ""])
def test_a_runner_without_a_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a GPU model and the price of an hour, like T4"):
        parse_runner(text)


def test_an_unknown_runner_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="'A100' is not a GPU model; did you mean A100-40GB"):
        parse_runner("A100:1")


def test_the_same_runner_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="--runner T4 is given twice"):
        make_plan(SUITE, [T4, Rental(T4.model, 1.0)])


def test_a_start_that_leaves_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="take 5 minutes to start are not done in 4"):
        make_plan(SUITE, [T4], limit=240, startup=300)
