"""The table of tests and phases: which rows, which columns, and how they fit the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpumem.baseline.store import split_nodeid
from pytest_gpumem.baseline.verdict import Improvement, Verdict
from pytest_gpumem.measurement.record import Measurement, PhaseRecord
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.text import Line, Span, cells, pack, pad, shorten
from pytest_gpumem.sizes import format_size

GAP = "  "
FEW_ROWS = 24
"""Up to so many rows, every phase is shown without being asked for."""
MOST_TESTS = 24
"""Beyond so many tests, only those with something to say and the largest are shown."""

STATUS_STYLE = {
    "FAIL": "bold red",
    "xfail": "yellow",
    "better": "cyan",
    "new": "yellow",
    "ok": "green",
    "-": "dim",
}


@dataclass(frozen=True)
class Column:
    """One column of numbers; ``weight``: the heaviest is given up last in a narrow terminal."""

    key: str
    title: str
    full_title: str
    weight: int

    def heading(self, verbose: bool) -> str:
        """Return the title; the full one where there is room for exact bytes anyway."""
        return self.full_title if verbose else self.title


LEAST_WEIGHT = 5
"""Of the columns that no table goes without as long as anything fits."""

LEAST_NAME = 26
"""Columns of the terminal below which a name is not shortened to make room for numbers."""

COLUMNS = (
    Column("peak_allocated", "peak", "peak allocated", 7),
    Column("allocated_after", "after", "allocated after", 3),
    Column("peak_reserved", "reserved", "peak reserved", 4),
    Column("leaked", "leaked", "leaked", 2),
    Column("cublas_workspace", "cuBLAS", "cuBLAS workspace", 1),
    Column("allowed", "allowed", "allowed", 5),
    Column("status", "", "", 8),
)

# A verdict's limit in the words of the marker, a reference by its kind.
LIMIT_WORDS = {"peak_allocated": "max", "peak_reserved": "max reserved", "leaked": "max leak"}
REFERENCE_WORDS = {"baseline": "baseline", "prediction": "predicted"}


@dataclass(frozen=True)
class Row:
    """One line of the table: a test, a further device of a test, or a phase."""

    name: str
    depth: int
    numbers: Mapping[str, int | None]
    verdict: Verdict | None = None
    """The one that says what the row may be."""
    status: str = ""

    @property
    def indented(self) -> str:
        """The name as it stands in the table."""
        return GAP * (self.depth + 1) + self.name

    def cell(self, column: Column, size: Callable[[int], str]) -> str:
        """Return the text in ``column``, numbers as ``size`` writes them."""
        if column.key == "status":
            return self.status
        if column.key == "allowed":
            return _allowed(self.verdict, size)
        number = self.numbers.get(column.key)
        return "" if number is None else size(number)

    def style(self, column: Column) -> str:
        """Return the style of the text in ``column``: a number that failed stands out."""
        if column.key == "status":
            return STATUS_STYLE.get(self.status, "")
        verdict = self.verdict
        over = verdict is not None and not verdict.passed and verdict.metric == column.key
        return "red" if over else ""


def table(records: Sequence[TestRecord], *, verbosity: int, width: int) -> list[Line]:
    """Return the table of ``records`` in at most ``width`` columns, by test module.

    Verbose (``verbosity`` above 0): every test and phase, every column, exact bytes.
    """
    verbose = verbosity > 0
    shown = list(records) if verbose else _worth_showing(records)
    every = verbose or sum(1 + _phase_count(record) for record in shown) <= FEW_ROWS
    modules = _by_module(shown)
    rows = {
        module: [row for record in found for row in _rows(record, every)]
        for module, found in modules.items()
    }
    lines = _lines(rows, verbose, width)
    if hidden := len(records) - len(shown):
        more = f"and {hidden} more test{'s' if hidden > 1 else ''} with smaller peaks"
        lines.append(Line.of(shorten(f"  {more} (-v shows all)", width), "dim"))
    return lines


def test_status(record: TestRecord) -> str:
    """Return the word for a test: a key of :data:`STATUS_STYLE`, ``-`` where it was not judged."""
    if record.broken:
        return "FAIL" if record.outcome == "failed" else "xfail"
    if not record.judged or record.outcome in ("failed", "error"):
        return "-"
    if record.improvements:
        return "better"
    # A test that kept its limits is in order, baseline or not; which have none is listed below.
    return "new" if record.missing_baseline and not record.verdicts else "ok"


def _worth_showing(records: Sequence[TestRecord]) -> list[TestRecord]:
    if len(records) <= MOST_TESTS:
        return list(records)
    telling = [position for position, record in enumerate(records) if _telling(record)]
    silent = [position for position, record in enumerate(records) if not _telling(record)]
    silent.sort(key=lambda position: -_peak(records[position]))
    kept = telling + silent[: max(0, MOST_TESTS - len(telling))]
    return [records[position] for position in sorted(kept)]


def _telling(record: TestRecord) -> bool:
    return test_status(record) in ("FAIL", "xfail", "better")


def _peak(record: TestRecord) -> int:
    return max((measured.peak_allocated for measured in record.measurements), default=0)


def _phase_count(record: TestRecord) -> int:
    return sum(len(measured.phases) for measured in record.measurements)


def _by_module(records: Sequence[TestRecord]) -> dict[str, list[TestRecord]]:
    modules: dict[str, list[TestRecord]] = {}
    for record in records:
        modules.setdefault(split_nodeid(record.nodeid)[0], []).append(record)
    return modules


def _rows(record: TestRecord, every_phase: bool) -> Iterator[Row]:
    name = split_nodeid(record.nodeid)[1]
    if record.measurement is None:
        yield Row(name, 0, {}, _telling_verdict(record.verdicts), test_status(record))
    for measured in record.measurements:
        judged = _Judged.of(record, measured.device)
        if measured is record.measurement:
            depth, status = 0, test_status(record)
        else:
            name, depth, status = measured.device, 1, judged.status(None)
        verdict = _telling_verdict(judged.of_phase(None))
        yield Row(name, depth, _test_numbers(measured), verdict, status)
        yield from _phase_rows(measured, judged, every_phase, depth + 1)


def _phase_rows(
    measured: Measurement, judged: _Judged, every_phase: bool, depth: int
) -> Iterator[Row]:
    """Yield the phases, each behind its parent, then those that had to run and did not."""
    depths: dict[str | None, int] = {}
    for phase in _parents_first(measured.phases):
        verdicts = judged.of_phase(phase.name)
        limited = any(verdict.kind == "limit" or not verdict.passed for verdict in verdicts)
        own_depth = depths.get(phase.parent, depth)
        if not (every_phase or limited):
            depths[phase.name] = own_depth
            continue
        depths[phase.name] = own_depth + 1
        status = judged.status(phase.name)
        yield Row(phase.name, own_depth, _phase_numbers(phase), _telling_verdict(verdicts), status)
    for name in dict.fromkeys(verdict.phase for verdict in judged.verdicts):
        if name is not None and name not in measured.phases:
            yield Row(name, depth, {}, _telling_verdict(judged.of_phase(name)), judged.status(name))


def _parents_first(phases: Mapping[str, PhaseRecord]) -> Iterator[PhaseRecord]:
    children: dict[str | None, list[PhaseRecord]] = {}
    for phase in phases.values():
        children.setdefault(phase.parent if phase.parent in phases else None, []).append(phase)
    pending = children.get(None, [])[::-1]
    while pending:
        phase = pending.pop()
        yield phase
        pending += children.get(phase.name, [])[::-1]


@dataclass(frozen=True)
class _Judged:
    """What was said of one test on one device."""

    outcome: str
    verdicts: Sequence[Verdict]
    improvements: Sequence[Improvement]

    @classmethod
    def of(cls, record: TestRecord, device: str) -> _Judged:
        return cls(
            record.outcome,
            [verdict for verdict in record.verdicts if verdict.device == device],
            [better for better in record.improvements if better.device == device],
        )

    def of_phase(self, phase: str | None) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.phase == phase]

    def status(self, phase: str | None) -> str:
        verdicts = self.of_phase(phase)
        if any(not verdict.passed for verdict in verdicts):
            return "FAIL" if self.outcome == "failed" else "xfail"
        if any(better.phase == phase for better in self.improvements):
            return "better"
        return "ok" if verdicts else ""


def _test_numbers(measured: Measurement) -> dict[str, int | None]:
    return {
        "peak_allocated": measured.peak_allocated,
        "allocated_after": measured.allocated_after,
        "peak_reserved": measured.peak_reserved,
        "leaked": measured.leaked,
        "cublas_workspace": measured.cublas_workspace,
    }


def _phase_numbers(phase: PhaseRecord) -> dict[str, int | None]:
    return {
        "peak_allocated": phase.peak_allocated,
        "allocated_after": phase.allocated_after,
        "peak_reserved": phase.peak_reserved,
        "cublas_workspace": phase.cublas_workspace,
    }


def _telling_verdict(verdicts: Sequence[Verdict]) -> Verdict | None:
    """A failed one before those that passed, the peak before other numbers, the tightest first."""
    bounded = [verdict for verdict in verdicts if verdict.limit is not None]
    return min(
        bounded,
        key=lambda one: (one.passed, one.metric != "peak_allocated", one.limit),
        default=None,
    )


def _allowed(verdict: Verdict | None, size: Callable[[int], str]) -> str:
    if verdict is None or verdict.limit is None:
        return ""
    if verdict.reference is None:
        return f"{LIMIT_WORDS[verdict.metric]} {size(verdict.limit)}"
    return f"{REFERENCE_WORDS[verdict.kind]} {size(verdict.reference)}"


@dataclass(frozen=True)
class _Grid:
    """The columns that are shown, and how wide each is."""

    columns: tuple[Column, ...]
    widths: Mapping[str, int]
    name_width: int
    verbose: bool

    @classmethod
    def fitting(cls, rows: Sequence[Row], verbose: bool, width: int) -> _Grid:
        size = _exact if verbose else format_size
        widths = {
            column.key: max(
                cells(column.heading(verbose)), *(cells(row.cell(column, size)) for row in rows)
            )
            for column in COLUMNS
        }
        longest = max(cells(row.indented) for row in rows)
        least = min(longest, LEAST_NAME if verbose else max(LEAST_NAME, width // 3), width // 2)
        columns = _fitting_columns(rows, widths, width - least)
        room = width - sum(len(GAP) + widths[column.key] for column in columns)
        return cls(columns, widths, min(longest, room), verbose)

    def heading(self) -> Line:
        titles = [
            pad(column.heading(self.verbose), self.widths[column.key], right=True)
            for column in self.columns
        ]
        unit = pad("bytes" if self.verbose else "", self.name_width)
        return Line.of(GAP.join([unit, *titles]).rstrip(), "bold")

    def line(self, row: Row) -> Line:
        spans = [Span(pad(shorten(row.indented, self.name_width), self.name_width))]
        for column in self.columns:
            text = row.cell(column, _exact if self.verbose else format_size)
            before = 0 if column.key == "status" else self.widths[column.key] - cells(text)
            spans += [Span(GAP + " " * before), Span(text, row.style(column))]
        return _trimmed(spans)


def _fitting_columns(
    rows: Sequence[Row], widths: Mapping[str, int], room: int
) -> tuple[Column, ...]:
    """Return the columns for which there is room, those that say least given up first."""

    def worth(column: Column) -> tuple[bool, bool, int]:
        accused = any(row.style(column) == "red" for row in rows)
        optional = column.key in ("leaked", "cublas_workspace")
        silent = optional and not any(row.numbers.get(column.key) for row in rows)
        return not accused and column.weight < LEAST_WEIGHT, silent, -column.weight

    kept: list[Column] = []
    for column in sorted(COLUMNS, key=worth):
        room -= len(GAP) + widths[column.key]
        if room < 0:
            break
        kept.append(column)
    return tuple(column for column in COLUMNS if column in kept)


def _lines(rows: Mapping[str, Sequence[Row]], verbose: bool, width: int) -> list[Line]:
    grid = _Grid.fitting([row for found in rows.values() for row in found], verbose, width)
    stacked = verbose and len(grid.columns) < len(COLUMNS)
    lines = [] if stacked else [grid.heading()]
    for module, found in rows.items():
        lines.append(Line.of(shorten(module, width), "dim"))
        for row in found:
            lines += _stacked(row, width) if stacked else [grid.line(row)]
    return lines


def _stacked(row: Row, width: int) -> Iterator[Line]:
    """Every number under its row's name, for a terminal too narrow for the whole table."""
    name = shorten(row.indented, width - len(GAP) - cells(row.status))
    mark = Span(row.status, STATUS_STYLE.get(row.status, ""))
    yield _trimmed([Span(name), Span(GAP), mark])
    facts = []
    for column in COLUMNS:
        text = row.cell(column, "{:,} B".format)
        if text and column.key != "status":
            facts.append(text if column.key == "allowed" else f"{column.full_title} {text}")
    indent = GAP * (row.depth + 3)
    yield from map(Line.of, pack(facts, width, first=indent, rest=indent))


def _exact(size: int) -> str:
    return f"{size:,}"


def _trimmed(spans: list[Span]) -> Line:
    while spans and not spans[-1].text.strip():
        spans.pop()
    if spans:
        spans[-1] = Span(spans[-1].text.rstrip(), spans[-1].style)
    return Line(tuple(span for span in spans if span.text))
