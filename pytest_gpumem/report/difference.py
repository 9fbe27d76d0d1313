"""The changes between two runs, as a part of a pull request's comment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_gpumem.baseline.explanation import explanation_lines
from pytest_gpumem.baseline.verdict import change_text
from pytest_gpumem.report.compared import Compared, Row, Side, compare_environments
from pytest_gpumem.report.markdown import (
    MOST_EXPLAINED,
    MOST_ROWS,
    code,
    code_block,
    explained,
    table,
)
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import format_size

KINDS = {
    "regression": "grew",
    "improvement": "fell",
    "new": "new",
    "gone": "gone",
    "failed": "failed",
}
"""Words for the statuses, in the order of output; a test that failed has no peak to compare."""


def difference_section(
    before: Sequence[TestRecord], now: Sequence[TestRecord], name: str
) -> Iterator[str]:
    """Yield the Markdown of the changes since ``before``, which is called ``name``.

    The peaks of tests are compared within one environment, the largest growth first. Tests of
    environments in which one of the two measured none are left out.
    """
    sides = Side.of(before), Side.of(now)
    old, new = (
        {key for key, tests in side.tests.items() if any(test.figures for test in tests.values())}
        for side in sides
    )
    if not old & new:
        missing = "was measured in another environment" if old else "holds no measured test"
        yield f"**Against {code(name)}**: nothing to compare, because it {missing}."
        return
    compared = (one for key in old & new for one in compare_environments(*sides, key, key))
    found = [pair for one in compared if (pair := _difference(one))]
    if not found:
        yield f"**Against {code(name)}**: no peak changed."
        return
    order = list(KINDS)
    found.sort(
        key=lambda one: (
            order.index(one[1].status),
            -abs((one[1].b or 0) - (one[1].a or 0)),
            one[0].nodeid,
        )
    )
    counts = Counter(row.status for _, row in found)
    kinds = ", ".join(f"{counts[status]} {KINDS[status]}" for status in KINDS if counts[status])
    rows = table(("test", "before", "now", "change"), (_cells(*one) for one in found[:MOST_ROWS]))
    more = f"\n\nand {len(found) - MOST_ROWS} more" if len(found) > MOST_ROWS else ""
    yield f"**Against {code(name)}**: {kinds}\n\n{rows}{more}"
    grown = [one for one in found if one[1].status == "regression"]
    for test, row in grown[:MOST_EXPLAINED]:
        if lines := list(explained(explanation_lines(test.changes(row)))):
            yield f"{code(test.nodeid)}\n{code_block(lines)}"


def _difference(test: Compared) -> tuple[Compared, Row] | None:
    """Return the test with its peak's row, ``None`` where that does not differ."""
    row = next((row for row in test.rows if not row.phase), None)
    if row is None or row.status == "same" or (row.a, row.b) == (None, None):
        return None
    if row.status == "failed" and row.b is not None:  # it failed in the run before
        row = Row(row.phase, row.a, row.b, "new")
    return test, row


def _cells(test: Compared, row: Row) -> tuple[str, ...]:
    name = code(test.nodeid) + (f" (was {code(test.was)})" if test.was else "")
    if row.a is None or row.b is None:
        sizes = ("-" if size is None else format_size(size) for size in (row.a, row.b))
        return name, *sizes, KINDS[row.status]
    return name, format_size(row.a), format_size(row.b), change_text(row.a, row.b)
