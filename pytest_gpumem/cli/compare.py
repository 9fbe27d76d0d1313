"""``gpumem compare A B``: two reports or baselines folders, number by number."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.baseline.verdict import format_percent
from pytest_gpumem.cli.command import (
    Answer,
    Argument,
    Command,
    parsed,
    sentences,
    table,
    terminal_width,
)
from pytest_gpumem.quoting import quoted
from pytest_gpumem.report.compared import Compared, Row, Side, compare_environments
from pytest_gpumem.sizes import Tolerance, format_change, format_size, parse_tolerance
from pytest_gpumem.text import counted

STATUSES = ("regression", "improvement", "same", "new", "gone", "failed")
COLUMNS = ("test", "phase", "A", "B", "difference", "%", "status")

FORM = "JSON report, or baselines folder (of all environments or of one)"

MOST_EXPLAINED = 3
"""The most tests whose source lines are listed; ``--json`` has those of all."""


def run(arguments: argparse.Namespace) -> Answer:
    """Compare; raises ``ValueError`` for bad input."""
    given = arguments.tolerance
    tolerance = None if given is None else parsed("--tolerance", parse_tolerance, given)
    a, b = Side.read(arguments.a), Side.read(arguments.b)
    pairs = _pairs(a, b, arguments.across_environments)
    tests = [test for pair in pairs for test in compare_environments(a, b, *pair, tolerance)]
    if not tests:
        raise ValueError(f"neither {a.path} nor {b.path} holds a measured test; nothing to compare")
    tests = _chosen(tests, arguments.test, arguments.phase)
    return Answer(
        [
            *sentences(_header(a, b, pairs, tolerance)),
            *_body(tests, arguments.all),
            *sentences([_totals(tests)]),
        ],
        lambda: as_dict(a, b, tests),
        failed=any(row.status == "regression" for row in _rows_of(tests)),
    )


def as_dict(a: Side, b: Side, tests: Sequence[Compared]) -> dict[str, Any]:
    """Return the JSON form as builtin types, in bytes; an empty phase is the whole test."""
    return {
        "a": {"path": str(a.path), "environments": sorted(a.tests)},
        "b": {"path": str(b.path), "environments": sorted(b.tests)},
        "tests": [
            {
                "nodeid": test.nodeid,
                "environment": test.environment,
                "was": test.was,
                "tolerance": test.tolerance or None,
                "numbers": [{**asdict(row), "changes": test.changes(row)} for row in test.rows],
            }
            for test in tests
        ],
    }


def _chosen(
    tests: Iterable[Compared], parts: Sequence[str], phases: Collection[str]
) -> list[Compared]:
    """Return the requested tests, and the rows of each.

    Raises ``ValueError`` where there are none.
    """
    patterns = [re.compile(re.escape(part).replace(r"\*", ".*")) for part in parts or ("",)]
    named = [test for test in tests if any(pattern.search(test.shown) for pattern in patterns)]
    if not named:
        raise ValueError(f"no test has {_either(parts)} in its node id")
    if not phases:
        return named
    cut = [
        replace(test, rows=rows)
        for test in named
        if (rows := tuple(row for row in test.rows if row.phase in phases))
    ]
    if not cut:
        known = dict.fromkeys(row.phase for row in _rows_of(named) if row.phase)
        raise ValueError(f"no test has a phase {_either(phases)}; there are: {', '.join(known)}")
    return cut


def _either(words: Collection[str]) -> str:
    return " or ".join(map(quoted, words))


def _rows_of(tests: Iterable[Compared]) -> Iterator[Row]:
    return (row for test in tests for row in test.rows)


def _pairs(a: Side, b: Side, across: bool) -> list[tuple[str, str]]:
    """Return the environments to compare, as keys of ``a`` and of ``b``."""
    pairs = [(key, key) for key in sorted(a.tests.keys() & b.tests.keys())]
    if across:
        # Environments that differ only in the kind of device: dry, simulated or measured.
        others = {key.partition("-")[2]: key for key in _only(b, a)}
        models = ((key, key.partition("-")[2]) for key in _only(a, b))
        pairs += [(key, others[model]) for key, model in models if model in others]
    paired_a, paired_b = {one for one, _ in pairs}, {other for _, other in pairs}
    only_a = [key for key in _only(a, b) if key not in paired_a]
    only_b = [key for key in _only(b, a) if key not in paired_b]
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
        kinds = (side.environments[key].kind.strip() or "measured" for key in keys)
        known = ", ".join(f"{key}, {kind}" for key, kind in zip(keys, kinds, strict=True))
        yield f"{name}: {side.path} ({known})"
    if tolerance is None:
        own = {
            nodeid
            for pair in pairs
            for side, key in zip((a, b), pair, strict=True)
            for nodeid, test in side.tests[key].items()
            if test.tolerance is not None
        }
        theirs = "; 1 test has its own" if len(own) == 1 else f"; {len(own)} tests have their own"
        dry = any(one.dry for side in (a, b) for one in side.environments.values())
        by_default = f"0 simulated{' or dry' * dry}, 1% + 1MiB measured"
        yield f"tolerance: {by_default}{theirs if own else ''}"
    else:
        yield f"tolerance: {tolerance}"
    yield ""


def _body(tests: Sequence[Compared], every: bool) -> Iterator[str]:
    both = sorted((test for test in tests if not _only_status(test)), key=_order)
    lines = [_cells(test, row) for test in both for row in test.rows if every or not row.is_equal]
    if lines:
        yield from table(
            [COLUMNS, *lines], left=(0, 1, 6), given_up=(5, 4), long=0, width=terminal_width()
        )
        yield ""
        yield from _explained(both)
    for status, where in (("new", "B"), ("gone", "A")):
        yield from _only_in(status, where, [one for one in tests if _only_status(one) == status])
    hidden = sum(row.is_equal for row in _rows_of(both)) if not every else 0
    if hidden:
        yield f"{hidden} equal {'number is' if hidden == 1 else 'numbers are'} not shown (--all)"
        yield ""


def _only_status(test: Compared) -> str:
    """Return ``new`` or ``gone`` if only one side has the test, else an empty text."""
    statuses = {row.status for row in test.rows}
    return statuses.pop() if len(statuses) == 1 and statuses <= {"new", "gone"} else ""


def _order(test: Compared) -> tuple[bool, int, str]:
    """Return the sort key: the largest regression first, then the largest improvement."""
    changes = [row.change or 0 for row in test.rows]
    regressed = any(row.status == "regression" for row in test.rows)
    largest = max(changes, key=abs, default=0)
    return not regressed, -abs(max(changes) if regressed else largest), test.shown


def _cells(test: Compared, row: Row) -> tuple[str, ...]:
    """Return the texts of :data:`COLUMNS`."""
    sizes = ["-" if size is None else format_size(size) for size in (row.a, row.b)]
    change, reference = row.change, row.a or 0
    difference = "" if change is None else format_change(change)
    percent = "" if change is None or reference <= 0 else format_percent(change, reference)
    status = (
        f"{row.status} (tolerance {test.tolerance})" if test.tolerance and change else row.status
    )
    return (test.shown, row.phase, *sizes, difference, percent.removesuffix(" %"), status)


def _explained(tests: Sequence[Compared]) -> Iterator[str]:
    """Yield the largest differences by line in the first tests that recorded lines."""
    left = MOST_EXPLAINED
    for test in tests:
        differing = [row for row in test.rows if row.status in ("regression", "improvement")]
        row = max(differing, key=lambda one: abs(one.change or 0), default=None)
        changes = test.changes(row) if row else []
        if row and changes and left:
            left -= 1
            yield " ".join(filter(None, (test.shown, row.phase))) + ", by line:"
            yield from explanation_lines(changes, width=terminal_width())
            yield ""


def _only_in(status: str, where: str, tests: Sequence[Compared]) -> Iterator[str]:
    """Yield the tests that only the side ``where`` has, with their peaks."""
    if not tests:
        return
    yield f"{status}, in {where} alone:"
    rows = []
    for test in tests:
        peak = next((row.a if row.b is None else row.b for row in test.rows), None)
        rows.append((test.shown, f"{'' if peak is None else format_size(peak):>9}"))
    lines = table(rows, left=(0,), long=0, width=terminal_width() - 2)
    yield from (f"  {line}" for line in lines)
    yield ""


def _totals(tests: Sequence[Compared]) -> str:
    rows = list(_rows_of(tests))
    counts = Counter(row.status for row in rows)
    numbers = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    both = [(row.a, row.b) for row in rows if not row.phase and row.status in STATUSES[:3]]
    a, b = (sum(pair[side] or 0 for pair in both) for side in (0, 1))
    percent = f", {format_percent(b - a, a)}" if a > 0 else ""
    return (
        f"{counted(len(both), 'test')} in A and B, peaks add up to {format_size(a)} and "
        f"{format_size(b)} ({format_change(b - a)}{percent}); numbers: {numbers}"
    )


COMMAND = Command(
    description="Compare what two runs measured. Exit code 1 where B exceeds A by more than "
    "the tolerance, 2 where A or B cannot be read.",
    run=run,
    arguments=(
        Argument("a A", f"before: {FORM}", type=Path),
        Argument("b B", "after: likewise", type=Path),
        Argument(
            "--tolerance TOLERANCE",
            'how far B may exceed A, like "1% + 1MiB", which is the default for measured '
            "numbers; 0 for simulated ones",
        ),
        Argument(
            "--across-environments",
            "compare although A and B were measured in different environments",
        ),
        Argument("--all", "show numbers that are equal, too"),
        Argument(
            "--test PART...",
            "compare only tests with this in their node id, * for anything; may be repeated",
        ),
        Argument("--phase NAME...", "compare only this phase; may be repeated"),
    ),
    examples=(
        "gpumem compare main.json change.json",
        "gpumem compare baselines/ report.json --test attention --phase backward",
    ),
)
