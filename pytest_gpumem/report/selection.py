"""The selection of tests for the table, and their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pytest_gpumem.report.causes import alike, keys_of
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.rows import rows_of, test_status

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
    shown = ordered if len(ordered) <= most else _worth_showing(ordered, most, sort)
    few = sum(1 + _phase_count(record) for record in shown) <= max(most, ROWS)
    every = verbose or (few and len(shown) == len(records))
    return shown, every


def _worth_showing(records: Sequence[TestRecord], most: int, sort: Sort | None) -> list[TestRecord]:
    """Return ``most`` of the tests: the first ones in a requested order, else the remarkable ones.

    These are tests with remarks and those with the largest peaks. Where more have remarks, ``most``
    limits their rows, with a few tests for each cause.
    """
    if sort is not None:
        return list(records[:most])
    telling = [position for position, record in enumerate(records) if _telling(record)]
    silent = [position for position, record in enumerate(records) if not _telling(record)]
    silent.sort(key=lambda position: -_peak(records[position]))
    if len(telling) > most:
        ranks = _ranks([records[position] for position in telling])
        telling.sort(key=lambda position: ranks[id(records[position])])
        telling = [position for position in telling if ranks[id(records[position])] < OF_A_CAUSE]
        silent = []
        left = most
        for index, position in enumerate(telling):
            left -= len(list(rows_of(records[position], False)))
            if left < 0:
                telling = telling[: max(index, 1)]
                break
    kept = telling + silent[: max(0, most - len(telling))]
    return [records[position] for position in sorted(kept)]


def _ranks(records: Sequence[TestRecord]) -> dict[int, int]:
    """Return by identity how many tests of one cause failed before each: the first matter most."""
    keys = [keys_of(record.broken) if record.failed else [record.nodeid] for record in records]
    groups = alike(keys)
    return {id(records[at]): rank for group in groups for rank, at in enumerate(group)}


def _telling(record: TestRecord) -> bool:
    return test_status(record) in ("FAIL", "xfail", "better") or _leaked(record) > 0


def hidden_text(records: Sequence[TestRecord], shown: Sequence[TestRecord]) -> str:
    """Return how many tests are not shown, and how many of these failed."""
    seen = set(map(id, shown))
    hidden = [record for record in records if id(record) not in seen]
    if not hidden:
        return ""
    more = f"and {len(hidden)} more test{'s' if len(hidden) > 1 else ''}"
    if failed := sum(record.failed for record in hidden):
        return f"{more}, {failed} of them failed (--gpumem-rows all shows all)"
    return f"{more} with smaller peaks (-v shows all)"


def _leaked(record: TestRecord) -> int:
    return max((measured.leaked or 0 for measured in record.measurements), default=0)


def _over(record: TestRecord) -> int:
    """Return the bytes by which a test is over its limit; below it they are negative."""
    compared = [verdict.excess for verdict in record.verdicts if verdict.limit is not None]
    return max(compared, default=-_MOST_BYTES)


_MOST_BYTES = 1 << 60

OF_A_CAUSE = 8
"""Rows for failures of one cause, where failures are many: FAILURES names the others."""

Sort = Literal["peak", "leaked", "over", "name"]

_ORDERS: Mapping[str, Callable[[TestRecord], Any]] = {
    "peak": lambda record: -_peak(record),
    "leaked": lambda record: -_leaked(record),
    "over": lambda record: -_over(record),
    "name": lambda record: record.nodeid,
}


def _peak(record: TestRecord) -> int:
    return max((measured.peak_allocated for measured in record.measurements), default=0)


def _phase_count(record: TestRecord) -> int:
    return sum(len(measured.phases) for measured in record.measurements)
