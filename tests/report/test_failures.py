"""The key that failures of one cause share."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.report.failures import Failure
from tests.report.example_run import MIB, verdict


def line(nbytes: int, site: str = "net.py:7", change: str = "new") -> dict[str, Any]:
    return {
        "bytes": nbytes,
        "change": change,
        "category": "activations",
        "site": site,
        "operator": "torch.add",
        "count": 1,
    }


def failure(*lines: dict[str, Any], **changes: Any) -> Failure:
    over = sum(one["bytes"] for one in lines)
    broken = verdict("baseline", 8 * MIB + over, 8 * MIB, reference=8 * MIB)
    fields = {**vars(broken), "explanation": lines, **changes}
    return Failure("t.py::test_x", (type(broken)(**fields),))


def test_the_same_line_is_one_cause_for_any_size() -> None:
    assert failure(line(512)).keys == failure(line(8 * MIB)).keys
    assert failure(line(512)).keys != failure(line(512, site="net.py:9")).keys
    assert failure(line(512)).keys != failure(line(512, change="grown")).keys


def test_rounding_by_the_allocator_is_no_other_cause() -> None:
    rounded = failure(line(900), line(100, site="net.py:9"))
    assert rounded.keys == failure(line(900)).keys
    half = failure(line(500), line(500, site="net.py:9"))
    assert half.keys != failure(line(500)).keys


@pytest.mark.parametrize("changes", [{"phase": "step"}, {"kind": "prediction"}])
def test_another_verdict_is_another_cause(changes: dict[str, Any]) -> None:
    assert failure(line(512), **changes).keys != failure(line(512)).keys


def test_a_sentence_is_a_cause() -> None:
    damaged = Failure("t.py::test_x", (), "baseline a.json is damaged")
    assert damaged.keys == Failure("t.py::test_y", (), "baseline a.json is damaged").keys
    assert damaged.brief == "baseline a.json is damaged"
