"""The record of a test, judged without a device and without running the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pytest_gpumem.marker import Expectation
from pytest_gpumem.session.judge import CHECKED_ON_A_GPU, Judge
from pytest_gpumem.session.run import Prepared
from pytest_gpumem.sizes import MIB, parse_tolerance
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement

T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    config: Any = Mock(stash={})
    config.getoption.return_value = config.getini.return_value = None
    return Judge(config, Mock(baselines=tmp_path, update_baselines=None, defaults={}))


def prepared(expectation: Expectation | None = None) -> Prepared:
    item: Any = Mock(nodeid="test_a.py::test_a")
    device: Any = Mock(environment=T4)
    device.nvml.return_value = None
    return Prepared(item, expectation, device, predicted=None, quota=None, among_ranks=False)


def measured(peak: int, device: str = "cuda:0") -> Measurement:
    return Measurement(device, True, peak, peak, 0, 0, 0, 0)


def test_an_unmarked_test_that_used_no_device_has_no_record(judge: Judge) -> None:
    assert judge.record(prepared(), measured(0), (), passed=True) is None


def test_an_unmarked_test_is_recorded_and_not_judged(judge: Judge) -> None:
    record = judge.record(prepared(), measured(MIB), (), passed=True)

    assert record is not None
    assert (record.judged, record.verdicts, record.expectation) == (False, (), {})


def test_a_limit_is_judged_where_the_body_passed(judge: Judge) -> None:
    test = prepared(Expectation(max=MIB))

    over = judge.record(test, measured(2 * MIB), (), passed=True)
    within = judge.record(test, measured(MIB), (), passed=True)
    failed = judge.record(test, measured(2 * MIB), (), passed=False)

    assert over
    assert within
    assert failed
    assert [(one.kind, one.excess) for one in over.broken] == [("limit", MIB)]
    assert within.broken == ()
    assert (failed.outcome, failed.judged, failed.verdicts) == ("failed", False, ())


def test_limits_hold_for_every_device(judge: Judge) -> None:
    other = measured(3 * MIB, "cuda:1")
    record = judge.record(prepared(Expectation(max=MIB)), measured(MIB), [other], passed=True)

    assert record
    assert [(one.device, one.excess) for one in record.broken] == [("cuda:1", 2 * MIB)]


def test_a_rank_is_part_of_the_environment(judge: Judge) -> None:
    record = judge.record(prepared(), measured(MIB), (), passed=True, ranks="rank 3 of 8")

    assert record
    assert record.environment.ranks == "rank 3 of 8"


def test_a_prediction_is_not_compared_with_itself(judge: Judge) -> None:
    expectation = Expectation(predict=parse_tolerance("1%"))
    record = judge.record(prepared(expectation), measured(MIB), (), passed=True)

    assert record
    assert record.measurement
    assert record.measurement.notes == (CHECKED_ON_A_GPU,)


@pytest.mark.parametrize(
    ("expectation", "runs"), [(None, 1), (Expectation(), 1), (Expectation(warmup=2, repeat=3), 5)]
)
def test_a_body_runs_as_often_as_its_marker_says(expectation: Expectation, runs: int) -> None:
    assert prepared(expectation).runs == runs
