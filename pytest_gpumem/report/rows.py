"""The rows of the table: tests, their further devices and their phases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpumem.baseline.store import split_nodeid
from pytest_gpumem.baseline.verdict import Verdict, main_verdict
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import format_apart, format_size
from pytest_gpumem.values.measurement import Measurement, PhaseRecord

GAP = "  "
STATUSES = {
    "ok": ("green", "ok"),
    "FAIL": ("bold red", "failed"),
    "OOM": ("bold red", "out of memory"),
    "xfail": ("yellow", "failed as expected"),
    "better": ("cyan", "improved"),
    "new": ("yellow", "without baseline"),
    "-": ("dim", "not judged"),
    "": ("", ""),
}
"""The style of each status of a test, and its words in the summary, in the summary's order."""


@dataclass(frozen=True)
class Column:
    """A column of numbers; in narrow terminals, columns of small ``weight`` are dropped first."""

    key: str
    title: str
    full_title: str
    weight: int

    def heading(self, verbose: bool) -> str:
        """Return the title; the full one if ``verbose``, as columns are then wide."""
        return self.full_title if verbose else self.title


COLUMNS = (
    Column("peak_allocated", "peak", "peak allocated", 7),
    Column("allocated_after", "after", "allocated after", 3),
    Column("peak_reserved", "reserved", "peak reserved", 4),
    Column("leaked", "leaked", "leaked", 2),
    Column("cublas_workspace", "cuBLAS", "cuBLAS workspace", 1),
    Column("allowed", "allowed", "allowed", 5),
    Column("status", "", "", 8),
)

# The name of a verdict's limit in the marker; a reference is named by its kind.
LIMIT_WORDS = {"peak_allocated": "max", "peak_reserved": "max reserved", "leaked": "max leak"}
REFERENCE_WORDS = {"baseline": "baseline", "prediction": "predicted"}
MISSING_WORDS = {"baseline": "no baseline", "prediction": "no prediction"}
"""The words where a test must have a reference and has none."""


@dataclass(frozen=True)
class Row:
    """A line of the table: a test, a further device of a test, or a phase."""

    name: str
    depth: int
    numbers: Mapping[str, int | None]
    verdict: Verdict | None = None
    """The verdict that gives the row's limit."""
    status: str = ""
    limited: frozenset[str] = frozenset()
    """The metrics that the test's own limits are on."""

    @property
    def indented(self) -> str:
        """The name as it is in the table."""
        return GAP * (self.depth + 1) + self.name

    def texts(self, exact: bool) -> dict[str, str]:
        """Return the text of each column by its key; numbers in bytes if ``exact``."""
        texts = {column.key: "" for column in COLUMNS} | {"status": self.status}
        for key, number in self.numbers.items():
            if number is not None:
                texts[key] = f"{number:,}" if exact else format_size(number)
        verdict = self.verdict
        if verdict is not None and verdict.limit is not None:
            yardstick = verdict.limit if verdict.reference is None else verdict.reference
            # With enough digits to distinguish the two numbers.
            measured, allowed = format_apart(verdict.actual, yardstick)
            if exact:
                allowed = f"{yardstick:,}"
            elif texts[verdict.metric]:
                texts[verdict.metric] = measured
            if verdict.reference is None and not exact:
                allowed = verdict.limit_in_words or allowed
            words = REFERENCE_WORDS.get(verdict.kind) or LIMIT_WORDS[verdict.metric]
            texts["allowed"] = f"{words} {allowed}"
        elif verdict is not None and verdict.kind in MISSING_WORDS:
            texts["allowed"] = MISSING_WORDS[verdict.kind]
        return texts

    def style(self, column: Column) -> str:
        """Return the style of the text in ``column``; failed numbers are highlighted."""
        if column.key == "status":
            return STATUSES[self.status][0]
        verdict = self.verdict
        if verdict is None or verdict.limit is None or verdict.passed:
            return ""
        return "red" if verdict.metric == column.key else ""


def test_status(record: TestRecord) -> str:
    """Return the status of a test: a key of :data:`STATUSES`, ``-`` if it was not judged."""
    if record.broken:
        return "FAIL" if record.outcome == "failed" else "xfail"
    if record.ran_out:
        return "OOM"
    if not record.judged or record.outcome in ("failed", "error"):
        return "-"
    if record.improvements:
        return "better"
    # A test within its limits passes; tests without a baseline are listed below the table.
    return "new" if record.missing_baseline and not record.verdicts else "ok"


def rows_of(record: TestRecord, every_phase: bool, below_module: bool = True) -> Iterator[Row]:
    """Yield the rows of a test, of its phases, and of its further devices.

    ``every_phase``: also phases without verdicts. ``below_module``: the module's path is left out
    of the node id.
    """
    name = split_nodeid(record.nodeid)[1] if below_module else record.nodeid
    if record.measurement is None:
        yield Row(name, 0, {}, _telling_verdict(record.verdicts), test_status(record))
    for measured in record.measurements:
        judged = _JudgedDevice(record, measured)
        if measured is record.measurement:
            depth, status = 0, test_status(record)
        else:
            name, depth, status = measured.device, 1, judged.status(None)
        of_test = judged.of_phase(None)
        limited = frozenset(one.metric for one in of_test if one.kind in ("limit", "leak"))
        yield Row(name, depth, _numbers(measured), _telling_verdict(of_test), status, limited)
        yield from _phase_rows(measured, judged, every_phase, depth + 1)


def _phase_rows(
    measured: Measurement, judged: _JudgedDevice, every_phase: bool, depth: int
) -> Iterator[Row]:
    """Yield the phases, each after its parent, then phases with a limit that did not run."""
    depths: dict[str | None, int] = {}
    for phase in parents_first(measured.phases):
        verdicts = judged.of_phase(phase.name)
        limited = any(_tells_more(verdict, judged) for verdict in verdicts)
        own_depth = depths.get(phase.parent, depth)
        if not (every_phase or limited):
            depths[phase.name] = own_depth
            continue
        depths[phase.name] = own_depth + 1
        status = judged.status(phase.name)
        yield Row(phase.name, own_depth, _numbers(phase), _telling_verdict(verdicts), status)
    for name in dict.fromkeys(verdict.phase for verdict in judged.verdicts):
        if name is not None and name not in measured.phases:
            yield Row(name, depth, {}, _telling_verdict(judged.of_phase(name)), judged.status(name))


def _tells_more(verdict: Verdict, judged: _JudgedDevice) -> bool:
    """Return whether a phase's verdict adds to that of the whole test."""
    if verdict.kind == "limit" or verdict.passed:
        return verdict.kind == "limit"
    whole = [one for one in judged.of_phase(None) if not one.passed and one.kind == verdict.kind]
    return not whole or verdict.phase not in judged.ran


def parents_first(phases: Mapping[str, PhaseRecord]) -> Iterator[PhaseRecord]:
    """Yield ``phases``, each after its parent."""
    children: dict[str | None, list[PhaseRecord]] = defaultdict(list)
    for phase in phases.values():
        children[phase.parent if phase.parent in phases else None].append(phase)
    pending = children[None][::-1]
    while pending:
        phase = pending.pop()
        yield phase
        pending += children[phase.name][::-1]


class _JudgedDevice:
    """The verdicts on one test on one device."""

    def __init__(self, record: TestRecord, measured: Measurement) -> None:
        self._failed = record.outcome == "failed"
        self.verdicts = [one for one in record.verdicts if one.device == measured.device]
        better = (one for one in record.improvements if one.device == measured.device)
        self._better = {one.phase for one in better}
        self.ran = measured.phases.keys()

    def of_phase(self, phase: str | None) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.phase == phase]

    def status(self, phase: str | None) -> str:
        verdicts = self.of_phase(phase)
        if any(not verdict.passed for verdict in verdicts):
            return "FAIL" if self._failed else "xfail"
        return "better" if phase in self._better else "ok" if verdicts else ""


def _numbers(measured: Measurement | PhaseRecord) -> dict[str, int | None]:
    return {column.key: getattr(measured, column.key, None) for column in COLUMNS[:5]}


def _telling_verdict(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the first failed verdict, at best with a limit; else the tightest one on the peak."""
    bounded = [verdict for verdict in verdicts if verdict.limit is not None]
    broken = [verdict for verdict in bounded if not verdict.passed]
    if broken:
        return main_verdict(broken)
    if unbounded := [verdict for verdict in verdicts if not verdict.passed]:
        return unbounded[0]
    return min(bounded, key=lambda one: (one.metric != "peak_allocated", one.limit), default=None)
