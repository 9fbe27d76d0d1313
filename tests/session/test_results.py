"""Results that the controller collects from reports, of its own process and of workers."""

from __future__ import annotations

from typing import Literal
from unittest.mock import Mock

import pytest

from pytest_gpumem.report.pytest_reports import ATTRIBUTE
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.session.results import Results
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement

T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")


@pytest.fixture
def results() -> Results:
    return Results(Mock(), Mock())


def report(
    nodeid: str,
    outcome: Literal["passed", "failed", "skipped"] = "passed",
    *,
    peak: int | None = None,
) -> pytest.TestReport:
    """Return a call report, with a record of ``peak`` bytes on it."""
    result = pytest.TestReport(nodeid, ("test_a.py", 1, nodeid), {}, outcome, None, "call")
    if peak is not None:
        measurement = Measurement("cuda:0", True, peak, peak, 0, 0, 0, 0)
        setattr(result, ATTRIBUTE, TestRecord(nodeid, outcome, T4, measurement).to_dict())
    return result


def peaks(results: Results) -> dict[str, int]:
    return {
        record.nodeid: record.measurement.peak_allocated
        for record in results.records
        if record.measurement
    }


def test_reports_without_a_record_are_ignored(results: Results) -> None:
    results.take(report("test_a.py::test_a"))

    assert results.records == []


@pytest.mark.parametrize(
    ("reported", "kept"),
    [
        ("test_a.py::test_a@group", "test_a.py::test_a"),
        ("test_a.py::test_a[x@y]@group", "test_a.py::test_a[x@y]"),
        ("test_a.py::test_a[x@y]", "test_a.py::test_a[x@y]"),
        ("at@home/test_a.py::test_a", "at@home/test_a.py::test_a"),
    ],
)
def test_the_group_of_loadgroup_is_left_out(results: Results, reported: str, kept: str) -> None:
    results.take(report(reported, peak=512))

    assert peaks(results) == {kept: 512}


@pytest.mark.parametrize(("called", "outcome"), [("passed", "error"), ("failed", "failed")])
def test_an_error_of_the_teardown_hides_no_failure(
    results: Results, called: Literal["passed", "failed"], outcome: str
) -> None:
    results.take(report("test_a.py::test_a", called, peak=512))
    teardown = report("test_a.py::test_a", "failed")
    teardown.when = "teardown"
    results.take(teardown)

    assert [record.outcome for record in results.records] == [outcome]


def test_an_attempt_that_is_rerun_does_not_count(results: Results) -> None:
    first = report("test_a.py::test_a", "failed", peak=4096)
    first.outcome = "rerun"  # type: ignore[assignment]  # as pytest-rerunfailures does
    results.take(first)
    assert peaks(results) == {}

    results.take(report("test_a.py::test_a", peak=512))
    assert peaks(results) == {"test_a.py::test_a": 512}


def test_the_controller_receives_a_worker_s_collection(results: Results) -> None:
    worker = Results(Mock(), Mock())
    worker.collected(["test_a.py::test_a"], marked=True)
    worker.not_collected("test_b.py::TestB")

    results.take_output(worker.output())
    results.take_output({})

    assert results.any_marked
    assert results.output() == worker.output()
