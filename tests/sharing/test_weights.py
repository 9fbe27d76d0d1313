"""Files with durations and needs of tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.report.json_report import write_report
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sharing.weights import Shard, Weights, read_weights
from tests.report.example_run import MIB, SIMULATED, measured


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "took.json"


def test_a_file_of_pytest_split_is_read(path: Path) -> None:
    path.write_text('{"a": 1.5, "b": 2}')
    assert read_weights(path) == Weights(seconds={"a": 1.5, "b": 2.0})
    # The format of its older releases.
    path.write_text('[["a", 1.5], ["b", 2]]')
    assert read_weights(path) == Weights(seconds={"a": 1.5, "b": 2.0})


def test_a_report_is_read(path: Path) -> None:
    took = {"alone": (1.5, None), "by itself": (2.5, 0), "beside": (9.0, 3)}
    write_report(
        path,
        [
            TestRecord(
                name, "passed", SIMULATED, measured(5 * MIB), duration=seconds, beside=beside
            )
            for name, (seconds, beside) in took.items()
        ],
    )
    # A duration measured beside others is not the test's own; its memory is.
    assert read_weights(path) == Weights(
        seconds={"alone": 1.5, "by itself": 2.5}, bytes=dict.fromkeys(took, 96 * MIB)
    )


def test_a_plan_is_read(path: Path) -> None:
    shards = [{"runner": "T4", "memory": 7, "price": 0.35, "tests": ["a"]}]
    numbers = {"seconds": {"a": 1.5}, "bytes": {"a": 3}}
    path.write_text(json.dumps({"schema_version": 1, "matrix": {}, "shards": shards, **numbers}))
    weights = read_weights(path)
    assert weights == Weights({"a": 1.5}, {"a": 3}, (Shard("T4", 7, 0.35, ("a",)),))
    assert Weights.from_dict(json.loads(json.dumps(weights.to_dict()))) == weights


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "does not say what tests take: not valid JSON"),
        ('{"a": "long"}', "does not say what tests take: no seconds by test id"),
        ("7", "does not say what tests take: no seconds by test id"),
        ('{"a": -1}', "does not say what tests take: a duration that is none"),
        ('{"a": NaN}', "does not say what tests take: a duration that is none"),
        ('{"schema_version": 1}', "is not one of pytest-gpumem"),
        ('{"schema_version": 7, "matrix": {}}', "has schema_version 7"),
        ('{"schema_version": 1, "matrix": {}}', "'shards' is missing or wrong"),
    ],
)
def test_any_other_file_is_refused(path: Path, content: Any, problem: str) -> None:
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as error:
        read_weights(path)
    assert str(path) in str(error.value)
    assert problem in str(error.value)
