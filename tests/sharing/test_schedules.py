"""Whatever tests come in whatever order: never over capacity, no deadlock, nobody starves."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from operator import le
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sharing.schedules import CAPACITY, Day, PlannedTest

CONTEXT = 20
WORKERS = 4
MOST = CAPACITY - WORKERS * CONTEXT
"""What the largest test may need: all that the contexts of the workers leave."""


@st.composite
def planned_tests(draw: st.DrawFn) -> PlannedTest:
    need = draw(st.integers(0, MOST))
    takes = draw(st.floats(0.5, 20))
    return PlannedTest(
        need=need,
        takes=takes,
        # Known, known badly or not at all.
        expected=draw(st.sampled_from([None, takes, takes * 2, takes / 2])),
        fixtures=draw(st.one_of(st.just(0), st.integers(0, need))),
        exclusive=draw(st.integers(0, 9)) == 0,
        priority=draw(st.sampled_from([0, 0, 0, 1, 5])),
        guaranteed=draw(st.booleans()),
    )


@st.composite
def exactly_timed(draw: st.DrawFn) -> PlannedTest:
    test = draw(planned_tests())
    # What ends later than expected may have been let past another on the strength of it.
    return replace(test, expected=draw(st.sampled_from([None, test.takes])))


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    plans=st.lists(st.lists(exactly_timed(), max_size=12), min_size=1, max_size=4),
    equals=st.booleans(),
)
def test_nobody_starves(plans: list[list[PlannedTest]], equals: bool) -> None:
    if equals:
        plans = [[replace(one, priority=0, guaranteed=True) for one in plan] for plan in plans]
    with tempfile.TemporaryDirectory() as folder:
        day = Day(Path(folder), plans, context=CONTEXT)
        day.play()
        for worker in day.workers:
            assert all(map(le, worker.waits, worker.bounds))
        day.ledger.close()


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans=st.lists(st.lists(planned_tests(), max_size=8), min_size=1, max_size=WORKERS))
def test_every_schedule_ends_within_capacity(plans: list[list[PlannedTest]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        day = Day(Path(folder), plans, context=CONTEXT)
        day.play()
        assert [len(worker.waits) for worker in day.workers] == [len(plan) for plan in plans]
        day.ledger.close()
