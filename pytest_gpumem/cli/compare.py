"""``gpumem compare A B``: two reports or baselines folders, number by number."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.baseline.compare import default_tolerance_for
from pytest_gpumem.baseline.store import read_folder, split_nodeid
from pytest_gpumem.baseline.verdict import format_percent
from pytest_gpumem.cli.columns import say
from pytest_gpumem.echo import printable
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.sizes import SizeError, Tolerance, format_size, parse_tolerance

if TYPE_CHECKING:
    from pytest_gpumem.device.environment import Environment
    from pytest_gpumem.report.record import TestRecord

REGRESSION = 1
STATUSES = ("regression", "improvement", "same", "new", "gone", "failed")
COLUMNS = ("test", "phase", "A", "B", "difference", "%", "status")

Figures = Mapping[str, int]
"""Peaks in bytes by phase, the whole test's under the empty name; empty for a failed test."""


@dataclass
class Side:
    """One of the two that are compared."""

    path: Path
    environments: dict[str, Environment] = field(default_factory=dict)
    tests: dict[str, dict[str, Figures]] = field(default_factory=dict)
    """By environment key and node id."""

    def add(self, environment: Environment, nodeid: str, figures: Figures) -> None:
        """Put one test in its place."""
        self.environments[environment.key] = environment
        self.tests.setdefault(environment.key, {})[nodeid] = figures


@dataclass(frozen=True)
class Row:
    """One compared number, in bytes; ``None`` on the side that lacks it."""

    nodeid: str
    phase: str
    a: int | None
    b: int | None
    status: str

    def cells(self) -> tuple[str, ...]:
        """Return the texts of :data:`COLUMNS`."""
        sizes = ["-" if size is None else format_size(size) for size in (self.a, self.b)]
        change = percent = ""
        if self.a is not None and self.b is not None:
            change = _signed(self.b - self.a)
            percent = format_percent(self.b - self.a, self.a) if self.a > 0 else ""
        names = printable(self.nodeid), printable(self.phase)
        return (*names, *sizes, change, percent.removesuffix(" %"), self.status)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "compare",
        help="compare two reports or baselines folders; exit code 1 on a regression",
        description="Compare what two runs measured. Exit code 1 where B exceeds A by more than "
        "the tolerance, 2 where A or B cannot be read.",
    )
    form = "JSON report, or baselines folder (of all environments or of one)"
    parser.add_argument("a", metavar="A", type=Path, help=f"before: {form}")
    parser.add_argument("b", metavar="B", type=Path, help="after: likewise")
    parser.add_argument(
        "--tolerance",
        help='how far B may exceed A, like "1%% + 1MiB", which is the default for measured '
        "numbers; 0 for simulated ones",
    )
    parser.add_argument(
        "--across-environments",
        action="store_true",
        help="compare although A and B were measured in different environments",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison and return the exit code; raises ``ValueError`` for bad input."""
    tolerance = _tolerance(arguments.tolerance)
    a, b = read_side(arguments.a), read_side(arguments.b)
    pairs = _pairs(a, b, arguments.across_environments)
    rows = [row for pair in pairs for row in compare_environments(a, b, *pair, tolerance)]
    if not rows:
        raise ValueError(f"neither {a.path} nor {b.path} holds a measured test; nothing to compare")
    say([*_header(a, b, pairs, tolerance), *_table(rows), _totals(rows)])
    return REGRESSION if any(row.status == "regression" for row in rows) else 0


def read_side(path: Path) -> Side:
    """Return what ``path`` holds: a baselines folder or a JSON report.

    Raises ``ValueError`` with one sentence where it is neither.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a JSON report or a baselines folder")
    return _folder_side(path) if path.is_dir() else _report_side(path)


def compare_environments(
    a: Side, b: Side, key_a: str, key_b: str, tolerance: Tolerance | None
) -> Iterator[Row]:
    """Yield the rows of one environment of each side, tests and phases in order.

    Without a ``tolerance``, that of the environment applies: exact only where both are simulated.
    """
    simulated = a.environments[key_a].simulated and b.environments[key_b].simulated
    allowed = tolerance or default_tolerance_for(simulated)
    before, after = a.tests[key_a], b.tests[key_b]
    suffix = f" [{key_a}]" if len(a.tests) > 1 else ""
    for nodeid in sorted(before.keys() | after.keys()):
        for row in _rows(nodeid, before.get(nodeid), after.get(nodeid), allowed):
            yield Row(f"{nodeid}{suffix}", row.phase, row.a, row.b, row.status)


def _rows(
    nodeid: str, before: Figures | None, after: Figures | None, tolerance: Tolerance
) -> Iterator[Row]:
    failed = {} in (before, after)
    before, after = before or {}, after or {}
    if failed:
        yield Row(nodeid, "", before.get(""), after.get(""), "failed")
        return
    for phase in [*before, *(phase for phase in after if phase not in before)]:
        a, b = before.get(phase), after.get(phase)
        yield Row(nodeid, phase, a, b, _status(a, b, tolerance))


def _status(a: int | None, b: int | None, tolerance: Tolerance) -> str:
    if a is None or b is None:
        return "new" if a is None else "gone"
    allowance = tolerance.allowance(max(a, 0))
    if b > a + allowance:
        return "regression"
    return "improvement" if b < a - allowance else "same"


def _folder_side(path: Path) -> Side:
    side = Side(path)
    for module, content in read_folder(path):
        for test_id, entry in content.tests.items():
            figures = {"": entry.peak_allocated, **entry.phases}
            side.add(content.environment, f"{module}::{test_id}", figures)
    return side


def _report_side(path: Path) -> Side:
    side = Side(path)
    for record in read_report(path):
        if record.measurement is not None or record.outcome in ("failed", "error"):
            nodeid = "::".join(split_nodeid(record.nodeid))
            side.add(record.environment, nodeid, _figures(record))
    return side


def _figures(record: TestRecord) -> Figures:
    """Return the numbers of a test, none where its body failed: they end where it ended."""
    if record.outcome not in ("passed", "xpassed") and not record.broken:
        return {}
    figures = {}
    for position, measurement in enumerate(record.measurements):
        device = f"{measurement.device} " if position else ""
        figures[device.strip()] = measurement.peak_allocated
        for name, phase in measurement.phases.items():
            figures[f"{device}{name}"] = phase.peak_allocated
    return figures


def _pairs(a: Side, b: Side, across: bool) -> list[tuple[str, str]]:
    """Return the environments to compare, as keys of ``a`` and of ``b``."""
    pairs = [(key, key) for key in sorted(a.tests.keys() & b.tests.keys())]
    only_a, only_b = _only(a, b), _only(b, a)
    if across and len(only_a) == len(only_b) == 1:
        return [*pairs, (only_a[0], only_b[0])]
    if across and only_a and only_b:
        raise ValueError(
            f"{a.path} has {', '.join(only_a)} and {b.path} has {', '.join(only_b)}, so it is not "
            "clear which belong together; give folders of one environment each"
        )
    if a.tests and b.tests and not pairs:
        raise ValueError(
            f"{a.path} was measured in {', '.join(only_a)} and {b.path} in {', '.join(only_b)}; "
            "compare them all the same with --across-environments"
        )
    return pairs


def _only(side: Side, other: Side) -> list[str]:
    return sorted(side.tests.keys() - other.tests.keys())


def _header(
    a: Side, b: Side, pairs: list[tuple[str, str]], tolerance: Tolerance | None
) -> Iterator[str]:
    if differing := [*_only(a, b), *_only(b, a)]:
        compared = {key for pair in pairs for key in pair}
        left_out = [key for key in differing if key not in compared]
        verdict = f"not compared: {', '.join(left_out)}" if left_out else "compared all the same"
        yield (
            f"environments differ: {', '.join(sorted(a.tests))} in A, "
            f"{', '.join(sorted(b.tests))} in B; {verdict}"
        )
    for name, side in (("A", a), ("B", b)):
        keys = sorted({pair[name == "B"] for pair in pairs})
        known = [_described(side.environments[key]) for key in keys]
        yield f"{name}: {side.path} ({', '.join(known)})"
    yield f"tolerance: {'0 simulated, 1% + 1MiB measured' if tolerance is None else tolerance}"
    yield ""


def _described(environment: Environment) -> str:
    return f"{environment.key}, {'simulated' if environment.simulated else 'measured'}"


def _table(rows: list[Row]) -> Iterator[str]:
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(line[2:6], widths[2:], strict=False)]
        yield "  ".join((*left, *right, line[6]))
    yield ""


def _totals(rows: list[Row]) -> str:
    counts = Counter(row.status for row in rows)
    numbers = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    both = [(row.a, row.b) for row in rows if not row.phase and row.status in STATUSES[:3]]
    a, b = (sum(pair[side] or 0 for pair in both) for side in (0, 1))
    percent = f", {format_percent(b - a, a)}" if a > 0 else ""
    tests = "1 test" if len(both) == 1 else f"{len(both)} tests"
    return (
        f"{tests} in A and B, peaks add up to {format_size(a)} and {format_size(b)} "
        f"({_signed(b - a)}{percent}); numbers: {numbers}"
    )


def _signed(change: int) -> str:
    sign = "" if change == 0 else "+" if change > 0 else "-"
    return f"{sign}{format_size(abs(change))}"


def _tolerance(text: str | None) -> Tolerance | None:
    try:
        return None if text is None else parse_tolerance(text)
    except SizeError as error:
        raise ValueError(f"--tolerance: {error}") from None
