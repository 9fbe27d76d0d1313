"""Failures that share a reason stand together, the most common reason first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpumem.report.html.causes import causes_of
from pytest_gpumem.report.html.view import status_of
from pytest_gpumem.report.record import TestRecord
from tests.report.example_run import (
    MIB,
    failing,
    improved,
    measured,
    passing,
    record,
    unknown,
    verdict,
)

SOFTMAX = {
    "change": "new",
    "category": "activations",
    "site": "model.py:71",
    "operator": "torch.softmax",
}


def grown(name: str, *changes: int, reference: int | None = 64 * MIB, **line: Any) -> TestRecord:
    explained = replace(
        verdict("baseline", 80 * MIB, 64 * MIB, reference=reference),
        kind="limit" if reference is None else "baseline",
        explanation=tuple({**SOFTMAX, "bytes": change, **line} for change in changes),
    )
    limit = verdict("limit", 80 * MIB, 70 * MIB)
    return record(name, measured(80 * MIB), limit, explained, outcome="failed")


def test_tests_that_grew_by_the_same_line_are_one_cause() -> None:
    found = causes_of(
        [
            grown("test_a", 32 * MIB, 1),
            failing(),
            grown("test_b", 128 * MIB),
            passing(),
            grown("test_c", 64 * MIB),
        ]
    )
    assert found == [
        {
            "words": ["activations", "model.py:71", "torch.softmax"],
            "tests": [0, 2, 4],
            "size": "+32.0 MiB to +128.0 MiB",
        },
        {"words": ["over a baseline"], "tests": [1], "size": ""},
    ]


def test_what_is_over_a_limit_is_no_difference() -> None:
    (cause,) = causes_of([grown("test_a", 32 * MIB, reference=None)])
    assert cause["size"] == "32.0 MiB"
    assert cause["words"][0] == "over a limit, mostly by"


def test_running_out_of_memory_is_a_cause_of_its_own() -> None:
    shortage = {"requested": 3 * MIB, "site": "train.py:9", "operator": "torch.mm"}
    full = replace(record("test_a", None, outcome="failed"), out_of_memory=shortage)
    assert causes_of([full]) == [
        {
            "words": ["ran out of memory, asked by", "train.py:9", "torch.mm"],
            "tests": [0],
            "size": "3.0 MiB",
        }
    ]


def test_a_failure_that_is_not_of_memory_says_so() -> None:
    (cause,) = causes_of([record("test_a", measured(MIB), outcome="failed")])
    assert cause["words"] == ["failed for another reason than memory"]


def test_an_expected_failure_is_no_cause() -> None:
    assert causes_of([replace(failing(), outcome="xfailed"), passing(), improved()]) == []


def test_every_test_has_one_word_for_what_it_came_to() -> None:
    words = {
        "failed": failing(),
        "xfail": replace(failing(), outcome="xfailed"),
        "error": record("test_a", measured(MIB), outcome="failed"),
        "improved": improved(),
        "new": unknown(),
        "ok": passing(),
        "skipped": replace(passing(), outcome="skipped", judged=False),
        "measured": replace(passing(), judged=False),
    }
    assert {word: status_of(told) for word, told in words.items()} == {w: w for w in words}
