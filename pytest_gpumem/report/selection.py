"""The selection of tests for the table, and their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from pytest_gpumem.report.causes import alike, keys_of
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.rows import rows_of, test_status
from pytest_gpumem.text import counted

ROWS = 24
"""Up to so many rows, every phase is shown; beyond so many tests, only those with remarks and the
largest."""


def shown_tests(
    records: Sequence[TestRecord], most: int, verbose: bool, sort: Sort | None = None
) -> tuple[list[TestRecord], bool]:
    """Return the tests that the table shows, and whether it shows every phase of them."""
    ordered = list(records)
    if sort is not None:
        ordered.sort(key=_ORDERS[sort])
    shown = ordered if len(ordered) <= most else _remarkable(ordered, most, sort)
    rows = sum(1 + sum(len(m.phases) for m in record.measurements) for record in shown)
    few = rows <= max(most, ROWS) and len(shown) == len(records)
    return shown, verbose or few


def _remarkable(records: Sequence[TestRecord], most: int, sort: Sort | None) -> list[TestRecord]:
    """Return the first ``most`` tests in a requested order, else the remarkable ones as they ran.

    Tests with remarks come first, then those with the largest peaks. Where more than ``most`` have
    remarks, it limits their rows, with a few tests for each cause.
    """
    if sort is not None:
        return list(records[:most])
    remarked = [one for one in records if _has_remark(one)]
    others = [one for one in records if not _has_remark(one)]
    kept = remarked + sorted(others, key=lambda one: -_most(one, "peak_allocated"))
    kept = kept[: max(most, len(remarked))]
    if len(remarked) > most:
        ranks = _ranks(remarked)
        few = [one for one in remarked if ranks[id(one)] < OF_A_CAUSE]
        few.sort(key=lambda one: ranks[id(one)])
        rows = accumulate(len(list(rows_of(one, False))) for one in few)
        kept = few[: max(sum(used <= most for used in rows), 1)]
    chosen = set(map(id, kept))
    return [one for one in records if id(one) in chosen]


def _ranks(records: Sequence[TestRecord]) -> dict[int, int]:
    """Return by identity how many tests of one cause failed before each: the first matter most."""
    keys = [keys_of(record.broken) if record.failed else [record.nodeid] for record in records]
    groups = alike(keys)
    return {id(records[at]): rank for group in groups for rank, at in enumerate(group)}


def _has_remark(record: TestRecord) -> bool:
    return test_status(record) in ("FAIL", "xfail", "better") or _most(record, "leaked") > 0


def hidden_text(records: Sequence[TestRecord], shown: Sequence[TestRecord]) -> str:
    """Return how many tests are not shown, and how many of these failed."""
    seen = set(map(id, shown))
    hidden = [record for record in records if id(record) not in seen]
    if not hidden:
        return ""
    more = f"and {counted(len(hidden), 'more test')}"
    if failed := sum(record.failed for record in hidden):
        return f"{more}, {failed} of them failed (--gpumem-rows all shows all)"
    return f"{more} with smaller peaks (-v shows all)"


def _most(record: TestRecord, number: str) -> int:
    """Return the largest ``number`` of a test's devices, in bytes."""
    return max((getattr(one, number) or 0 for one in record.measurements), default=0)


def _over(record: TestRecord) -> int:
    """Return the bytes by which a test is over its limit; below it they are negative."""
    compared = [verdict.excess for verdict in record.verdicts if verdict.limit is not None]
    return max(compared, default=-_MOST_BYTES)


_MOST_BYTES = 1 << 60

OF_A_CAUSE = 8
"""Rows for failures of one cause, where failures are many: FAILURES names the others."""

Sort = Literal["peak", "leaked", "over", "name"]

_ORDERS: Mapping[str, Callable[[TestRecord], Any]] = {
    "peak": lambda record: -_most(record, "peak_allocated"),
    "leaked": lambda record: -_most(record, "leaked"),
    "over": lambda record: -_over(record),
    "name": lambda record: record.nodeid,
}
