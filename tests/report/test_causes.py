"""Failures are grouped by their cause, the most common cause first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpumem.report.causes import Cause, causes_of
from pytest_gpumem.report.html.page import status_of
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
    assert summaries(found) == [
        (("activations", "model.py:71", "torch.softmax"), ["test_a", "test_b", "test_c"]),
        (("over a baseline",), ["tests/test_model.py::test_step"]),
    ]
    assert [cause.size for cause in found] == ["+16.0 MiB", "+16.0 MiB"]


def summaries(causes: list[Cause]) -> list[tuple[tuple[str, ...], list[str]]]:
    return [(cause.words, [record.nodeid for record in cause.records]) for cause in causes]


def test_sentences_that_differ_only_in_sizes_are_one_cause() -> None:
    """``3.0 MiB`` and ``12.0 MiB``, shapes and counts may differ; another line is another cause."""
    sentences = (
        "model.py:24 (torch.clone) takes 3.0 MiB of activations more (3 × (4, 256) float32)",
        "model.py:24 (torch.clone) takes 12.0 MiB of activations more (4 × (8, 256) float32)",
        "model.py:25 (torch.clone) takes 3.0 MiB of activations more (3 × (4, 256) float32)",
    )
    found = causes_of(
        [
            record(
                f"test_{number}",
                measured(80 * MIB),
                replace(
                    verdict("baseline", (80 + number) * MIB, 64 * MIB, reference=64 * MIB),
                    cause=sentence,
                ),
                outcome="failed",
            )
            for number, sentence in enumerate(sentences)
        ]
    )
    assert summaries(found) == [
        ((sentences[2],), ["test_2"]),
        (
            ("model.py:24 (torch.clone) takes … of activations more (…… float32)",),
            ["test_0", "test_1"],
        ),
    ]
    assert [cause.size for cause in found] == ["+18.0 MiB", "+16.0 MiB to +17.0 MiB"]


def test_an_exceeded_limit_has_a_cause_without_a_difference() -> None:
    (cause,) = causes_of([grown("test_a", 32 * MIB, reference=None)])
    assert cause.size == "+16.0 MiB"
    assert cause.words[0] == "over a limit; the largest part:"


def test_running_out_of_memory_is_a_cause_of_its_own() -> None:
    shortage = {"requested": 3 * MIB, "free": MIB, "site": "train.py:9", "operator": "torch.mm"}
    full = replace(record("test_a", None, outcome="failed"), out_of_memory=shortage)
    (cause,) = causes_of([full])
    assert cause.words == ("ran out of memory at train.py:9 (torch.mm)",)
    assert cause.size == "+2.0 MiB"


def test_a_failure_that_is_not_of_memory_is_named_as_such() -> None:
    (cause,) = causes_of([record("test_a", measured(MIB), outcome="failed")])
    assert cause.words == ("failed for another reason than memory",)


def test_an_expected_failure_is_no_cause() -> None:
    assert causes_of([replace(failing(), outcome="xfailed"), passing(), improved()]) == []


def test_every_test_has_one_word_for_its_outcome() -> None:
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
    assert {word: status_of(test) for word, test in words.items()} == {w: w for w in words}
