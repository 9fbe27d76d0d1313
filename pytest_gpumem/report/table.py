"""The table of tests and phases: its tests and columns, chosen to fit the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from pytest_gpumem.baseline.store import split_nodeid
from pytest_gpumem.report.causes import alike, keys_of
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.rows import COLUMNS, GAP, STATUSES, Column, Row, rows_of, test_status
from pytest_gpumem.text import Line, TextRun, cells, counted, pack, pad, shorten

ROWS = 24
"""The most rows with all phases; of more tests, those with remarks and the largest are shown."""

LEAST_WEIGHT = 5
"""The least weight of the columns that are dropped last."""

LEAST_NAME = 26
"""The least width to which a name is shortened to make room for numbers."""


def table(
    records: Sequence[TestRecord],
    *,
    verbosity: int,
    width: int,
    rows: int | None = None,
    sort: Sort | None = None,
) -> list[Line]:
    """Return the table of ``records`` in at most ``width`` columns, by test module.

    ``rows`` is the number of tests shown, :data:`ROWS` by default; ``sort`` puts them in
    another order than that in which they ran. Verbose (``verbosity`` above 0): every test and
    phase, every column, exact bytes.
    """
    verbose = verbosity > 0
    most = (len(records) if verbose else ROWS) if rows is None else rows
    shown, every = _shown_tests(records, most, verbose, sort)
    found: dict[str, list[Row]] = defaultdict(list)
    for record in shown:
        module = split_nodeid(record.nodeid)[0] if sort in (None, "name") else ""
        found[module] += rows_of(record, every, bool(module))
    lines = _lines(found, verbose, width)
    if hidden := _hidden_text(records, shown):
        lines.append(Line.of(shorten(f"  {hidden}", width), "dim"))
    return lines


def _fitting_columns(
    rows: Sequence[Row], widths: Mapping[str, int], room: int
) -> tuple[Column, ...]:
    """Return the columns that fit; the least important are dropped first."""

    def worth(column: Column) -> tuple[bool, bool, bool, int]:
        accused = any(row.style(column) == "red" for row in rows)
        # Also a zero says that the number was checked.
        limited = any(column.key in row.limited for row in rows)
        optional = column.key in ("leaked", "cublas_workspace")
        silent = optional and not any(row.numbers.get(column.key) for row in rows)
        low = not accused and column.weight < LEAST_WEIGHT
        return low, low and not limited, silent, -column.weight

    kept: list[Column] = []
    for column in sorted(COLUMNS, key=worth):
        room -= len(GAP) + widths[column.key]
        if room < 0:
            break
        kept.append(column)
    return tuple(column for column in COLUMNS if column in kept)


def _lines(rows: Mapping[str, Sequence[Row]], verbose: bool, width: int) -> list[Line]:
    every = [row for found in rows.values() for row in found]
    texts = [row.texts(verbose) for row in every]
    widths = {
        column.key: max(cells(column.heading(verbose)), *(cells(row[column.key]) for row in texts))
        for column in COLUMNS
    }
    longest = max(cells(row.indented) for row in every)
    least = min(longest, LEAST_NAME if verbose else max(LEAST_NAME, width // 3), width // 2)
    columns = _fitting_columns(every, widths, width - least)
    stacked = verbose and len(columns) < len(COLUMNS)
    name = min(longest, width - sum(len(GAP) + widths[column.key] for column in columns))
    titles = [pad(column.heading(verbose), widths[column.key], right=True) for column in columns]
    heading = GAP.join([pad("bytes" if verbose else "", name), *titles]).rstrip()
    lines = [] if stacked else [Line.of(heading, "bold")]
    for module, found in rows.items():
        if module:
            lines.append(Line.of(shorten(module, width), "dim"))
        for row in found:
            if stacked:
                lines += _stacked(row, width)
                continue
            spans = [TextRun(pad(shorten(row.indented, name), name))]
            for column in columns:
                text = row.texts(verbose)[column.key]
                before = 0 if column.key == "status" else widths[column.key] - cells(text)
                spans += [TextRun(GAP + " " * before), TextRun(text, row.style(column))]
            lines.append(_trimmed(spans))
    return lines


def _stacked(row: Row, width: int) -> Iterator[Line]:
    """Yield every number under its row's name, for a terminal too narrow for the whole table."""
    name = shorten(row.indented, width - len(GAP) - cells(row.status))
    mark = TextRun(row.status, STATUSES[row.status][0])
    yield _trimmed([TextRun(name), TextRun(GAP), mark])
    texts = row.texts(True)
    named = {column.key: f"{column.full_title} " for column in COLUMNS} | {"allowed": ""}
    facts = [f"{named[key]}{text} B" for key, text in texts.items() if text and key != "status"]
    indent = GAP * (row.depth + 3)
    yield from map(Line.of, pack(facts, width, first=indent, rest=indent))


def _trimmed(spans: list[TextRun]) -> Line:
    while spans and not spans[-1].text.strip():
        spans.pop()
    if spans:
        spans[-1] = TextRun(spans[-1].text.rstrip(), spans[-1].style)
    return Line(tuple(span for span in spans if span.text))


def _shown_tests(
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
    """Return the first ``most`` tests if ``sort`` is given, else the most important, as they ran.

    Tests with remarks are chosen first, then those with the largest peaks. If more than ``most``
    have remarks, their rows are limited to ``most``, with a few tests for each cause.
    """
    if sort is not None:
        return list(records[:most])
    remarked = [one for one in records if _has_remark(one)]
    others = [one for one in records if not _has_remark(one)]
    kept = remarked + sorted(others, key=lambda one: -_most(one, "peak_allocated"))
    kept = kept[: max(most, len(remarked))]
    if len(remarked) > most:
        # The number of earlier failures of the same cause: the first ones are shown.
        keys = [keys_of(one.broken) if one.failed else [one.nodeid] for one in remarked]
        ranks = {id(remarked[at]): rank for group in alike(keys) for rank, at in enumerate(group)}
        few = [one for one in remarked if ranks[id(one)] < OF_A_CAUSE]
        few.sort(key=lambda one: ranks[id(one)])
        rows = accumulate(len(list(rows_of(one, False))) for one in few)
        kept = few[: max(sum(used <= most for used in rows), 1)]
    chosen = set(map(id, kept))
    return [one for one in records if id(one) in chosen]


def _has_remark(record: TestRecord) -> bool:
    return test_status(record) in ("FAIL", "xfail", "better") or _most(record, "leaked") > 0


def _hidden_text(records: Sequence[TestRecord], shown: Sequence[TestRecord]) -> str:
    """Return the text on the number of tests not shown, and of failed ones among them."""
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


_MOST_BYTES = 1 << 60

OF_A_CAUSE = 8
"""The most rows for one cause if there are many failures; FAILURES names the others."""

Sort = Literal["peak", "leaked", "over", "name"]

_ORDERS: Mapping[str, Callable[[TestRecord], Any]] = {
    "peak": lambda record: -_most(record, "peak_allocated"),
    "leaked": lambda record: -_most(record, "leaked"),
    # By the bytes over the limit, which are negative below it.
    "over": lambda record: (
        -max(
            (verdict.excess for verdict in record.verdicts if verdict.limit is not None),
            default=-_MOST_BYTES,
        )
    ),
    "name": lambda record: record.nodeid,
}
