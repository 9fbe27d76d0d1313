"""Any schedule of tests stays within capacity, without deadlock and without starvation."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from operator import le
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.sharing.schedules import CAPACITY, PlannedTest, Simulation

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A folder of Linux in memory: a ledger is created for each schedule."""

OF_ONE = settings(deadline=None, suppress_health_check=list(HealthCheck))
OF_TWO = settings(OF_ONE, max_examples=2 * OF_ONE.max_examples)
"""Days that are tried: five times as many with ``--hypothesis-profile thorough``, as in tox."""

CONTEXT = 20
WORKERS = 4
MOST = CAPACITY - WORKERS * CONTEXT
"""The need of the largest test: everything that the workers' contexts leave."""


NEEDS = st.integers(0, MOST)
TAKES = st.one_of(st.floats(0.5, 20), st.floats(60, 600))
"""Tests of minutes outlast the bonus of a rank."""
FIXTURES = st.one_of(st.just(0), st.integers(0, MOST))
TENTHS = st.integers(0, 9)
PRIORITIES = st.sampled_from([0, 0, 0, 1, 5])
GUARANTEED = st.booleans()
KNOWN_BADLY = st.sampled_from([None, 1, 2, 0.5])
"""The expected part of a test's duration: exact, wrong, or unknown (``None``)."""
KNOWN = st.sampled_from([None, 1])


@st.composite
def planned_tests(
    draw: st.DrawFn, known: st.SearchStrategy[float | None] = KNOWN_BADLY
) -> PlannedTest:
    need, takes, part = draw(NEEDS), draw(TAKES), draw(known)
    return PlannedTest(
        need=need,
        takes=takes,
        expected=None if part is None else takes * part,
        fixtures=min(need, draw(FIXTURES)),
        exclusive=draw(TENTHS) == 0,
        priority=draw(PRIORITIES),
        guaranteed=draw(GUARANTEED),
    )


EXACTLY_TIMED = planned_tests(KNOWN)
"""With wrong expectations, a test that passed another might delay it."""


def one(need: int = 0, takes: float = 1.0, **more: Any) -> PlannedTest:
    return PlannedTest(need, takes, **more)


FIXTURES_IN_THE_WAY = [[one(500, fixtures=500), one()], [one(500)], [one(takes=0.5), one(takes=9)]]
"""The late test runs beside the second one, whose room only fixtures of a waiting worker occupy."""
SECOND_IN_THE_QUEUE = [[one(500)], [one(600)], [one(700)], [one(takes=0.5), one(300, 9)]]
"""The last has room beside the 600 that wait first, and none beside the 700 behind them."""
EXCLUSIVE_IN_THE_QUEUE = [
    [one(500)],
    [one(600)],
    [one(exclusive=True)],
    [one(takes=0.5), one(0, 9)],
]
SEVERAL_PASS = [
    [one(500, takes=2)],
    [one(600)],
    [one(takes=0.5), one(250, takes=9, expected=9)],
    [one(takes=0.5), one(170, takes=9)],
]
"""Each of the last has room beside the 600, but not both; the end of the 500 is unknown."""


@OF_ONE
@given(
    plans=st.lists(st.lists(EXACTLY_TIMED, max_size=12), min_size=1, max_size=4),
    equals=st.booleans(),
)
@example(plans=FIXTURES_IN_THE_WAY, equals=True)
@example(plans=SECOND_IN_THE_QUEUE, equals=True)
@example(plans=EXCLUSIVE_IN_THE_QUEUE, equals=True)
@example(plans=SEVERAL_PASS, equals=True)
def test_no_test_starves(plans: list[list[PlannedTest]], equals: bool) -> None:
    if equals:
        plans = [[replace(test, priority=0, guaranteed=True) for test in plan] for plan in plans]
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        schedule = Simulation(Path(folder), plans, context=CONTEXT)
        schedule.play()
        for worker in schedule.workers:
            assert all(map(le, worker.waits, worker.bounds))
        schedule.ledger.close()


@OF_TWO
@given(plans=st.lists(st.lists(planned_tests(), max_size=8), min_size=1, max_size=WORKERS))
def test_every_schedule_ends_within_capacity(plans: list[list[PlannedTest]]) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        schedule = Simulation(Path(folder), plans, context=CONTEXT)
        schedule.play()
        assert [len(worker.waits) for worker in schedule.workers] == [len(plan) for plan in plans]
        schedule.ledger.close()
