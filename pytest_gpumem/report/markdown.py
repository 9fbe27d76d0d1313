"""Markdown for a pull request: grown peaks, their lines, and the command that accepts them.

It is GitHub's dialect, which GitLab and others read as well. Text from tests is put in code spans
or fences, where it is shown literally and not interpreted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.baseline.verdict import (
    change_text,
    main_verdict,
    statement_lines,
    update_command,
)
from pytest_gpumem.quoting import printable, shortened
from pytest_gpumem.report.causes import causes_of
from pytest_gpumem.report.compared import Compared, Row, Side, compare_environments
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import counted

MARKER = "pytest-gpumem"
"""A marker in the first line, by which a comment can be found and updated."""

MOST_ROWS = 20
"""The most tests of one kind that are listed."""
MOST_EXPLAINED = 5
"""The most failures whose source lines are listed."""
MOST_ALIKE = 5
"""The most tests of one cause that are named after the first."""
MOST_LINES = 6
"""The most lines of an explanation."""
MOST_NAME = 160
"""The most characters of a test's name, and of a word from a test."""
MOST_COMMAND = 400
"""The most characters of a command to copy."""
MOST_CHARACTERS = 60_000
"""The most characters of a comment; GitHub accepts 65,536."""


def document(
    records: Sequence[TestRecord],
    *,
    command: str = "pytest",
    skipped: Mapping[str, str] | None = None,
    sections: Iterable[str] = (),
    name: str = "",
) -> str:
    """Return the Markdown of a run, with ``sections`` after the failures.

    ``command`` is pytest's command line, for suggested commands; ``skipped`` has the reasons why
    tests could not be simulated, by node id; ``name`` distinguishes the comments of several jobs.
    """
    from pytest_gpumem.report.terminal import describe

    failed = [record for record in records if is_failure(record)]
    improved = [record for record in records if record.improvements and record not in failed]
    # A test within its limits passes without a baseline.
    new = [record for record in records if record.missing_baseline and not record.verdicts]
    environments = dict.fromkeys(code(describe(record.environment)) for record in records)
    locked = f"{command} --gpumem-update-baselines"
    if len(improved) == 1:
        locked = accepting(improved[0].nodeid, command)
    parts = [
        f"{marker(name)}\n### GPU memory: {_headline(records, failed, improved)}",
        f"Measured on {', '.join(environments)}." if records else "",
        _table(("test", "measured", "allowed", "over"), map(_failure_row, failed)),
        *_explanations(failed, command),
        *sections,
        _section(
            "Improved", ("test", "measured", "baseline", "change"), map(_improvement, improved)
        ),
        code_block([f"lock it in: {locked}"]) if improved else "",
        _section(
            "Without baseline",
            ("test", "peak"),
            ((code(one.nodeid), format_size(one.peak)) for one in new if one.measurement),
        ),
        code_block([f"record them: {command} --gpumem-update-baselines=new"]) if new else "",
        _section(
            "Not simulated, so not checked",
            ("test", "why"),
            ((code(nodeid), code(why)) for nodeid, why in (skipped or {}).items()),
        ),
    ]
    return bounded(filter(None, parts))


def marker(name: str = "") -> str:
    """Return the first line of a comment; ``name`` distinguishes comments of several jobs."""
    word = re.sub(r"[^\w.]+", "-", name).strip("-")
    return f"<!-- {MARKER}{': ' if word else ''}{word} -->"


def bounded(parts: Iterable[str]) -> str:
    """Return ``parts`` as paragraphs, without those that exceed the size of a comment."""
    kept: list[str] = []
    left_out, size = 0, 0
    for part in parts:
        if size + len(part) + 2 > MOST_CHARACTERS:
            left_out += 1
            continue
        kept.append(part)
        size += len(part) + 2
    if left_out:
        kept.append("More is in the JSON report: this comment has no room for it.")
    return "\n\n".join(kept) + "\n"


def is_failure(record: TestRecord) -> bool:
    """Return whether a test failed by its memory, or because memory ran out."""
    return record.failed or record.ran_out


def code(text: str, most: int = MOST_NAME) -> str:
    """Return ``text`` as Markdown that is displayed unchanged in any line or table."""
    text = printable(shortened(text, most))
    if not text.strip():
        return ""
    if not re.search(r"[`|\\]", text):
        return f"`{text}`"
    # Only character references work for all of these in a table's code span.
    shown = re.sub(r"[^A-Za-z0-9 ./:,=-]", lambda found: f"&#{ord(found[0])};", text)
    return f"<code>{shown}</code>"


def code_block(lines: Iterable[str]) -> str:
    """Return ``lines`` as a fenced block that no text in them can end."""
    text = "\n".join(printable(line) for line in lines)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, its first column aligned to the left and the others to the right."""
    lines = [headings, (":--", *("--:" for _ in headings[1:])), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _headline(
    records: Sequence[TestRecord], failed: Sequence[TestRecord], improved: Sequence[TestRecord]
) -> str:
    measured = sum(record.measurement is not None for record in records)
    if not records:
        return "no test was measured"
    if failed:
        return f"{len(failed)} of {counted(len(records), 'test')} failed"
    fell = f", {len(improved)} improved" if improved else ""
    unjudged = sum(not record.judged or record.outcome == "error" for record in records)
    open_ = f", {unjudged} not judged" if unjudged else ""
    return f"{counted(measured, 'test')} measured, none failed by it{fell}{open_}"


def _section(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = _table(headings, rows)
    return f"**{title}**\n\n{lines}" if lines else ""


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    found = list(rows)
    if not found:
        return ""
    more = (
        f"\n\nand {counted(len(found) - MOST_ROWS, 'test')} more" if len(found) > MOST_ROWS else ""
    )
    return table(headings, found[:MOST_ROWS]) + more


def _failure_row(record: TestRecord) -> tuple[str, ...]:
    name = code(record.nodeid)
    if not record.failed:
        facts = record.out_of_memory or {}
        asked, free = format_size(facts["requested"]), format_size(facts["free"])
        return name, f"asked for {asked}", f"{free} free", "out of memory"
    verdict = main_verdict(record.broken)
    allowed = verdict.limit if verdict.reference is None else verdict.reference
    phase = f"{code(verdict.phase)} " if verdict.phase else ""
    kind = {"peak_reserved": "reserved ", "leaked": "leaked "}.get(verdict.metric, "")
    if verdict.kind == "nothing_measured":
        return name, "nothing", "", "not checked"
    measured = f"{phase}{kind}{format_size(verdict.actual)}"
    if verdict.kind == "ran_eagerly":
        return name, measured, "", "ran eagerly"
    if allowed is None:
        return name, measured, f"no {verdict.kind}", "not checked"
    yardstick = {"baseline": "baseline", "prediction": "predicted"}.get(verdict.kind, "limit")
    same = allowed == verdict.actual
    over = "same" if same else change_text(allowed, verdict.actual)
    if verdict.actual <= (verdict.limit or 0) and verdict.kind != "prediction":
        over = "did not run"
    return name, measured, f"{yardstick} {format_size(allowed)}", over


def _explanations(failed: Sequence[TestRecord], command: str) -> Iterator[str]:
    """Yield the failures by cause: the first test of each in full, and names of further tests."""
    found = causes_of(failed)
    for cause in found[:MOST_EXPLAINED]:
        first, *more = cause.records
        lines = list(failure_lines(first, command))
        if not lines:
            continue
        names = ", ".join(code(record.nodeid) for record in more[:MOST_ALIKE])
        rest = f" and {len(more) - MOST_ALIKE} more" if len(more) > MOST_ALIKE else ""
        size = f", {cause.size}" if cause.size else ""
        alike = f"\n\nthe same cause in {counted(len(more), 'test')}{size}: {names}{rest}"
        yield f"{code(first.nodeid)}\n" + code_block(lines) + (alike if more else "")
    accepted = [record.nodeid for record in failed if _can_be_accepted(record)]
    if len(accepted) > 1:
        yield "To accept all of them:\n" + code_block([f"{command} --gpumem-update-baselines"])


def failure_lines(record: TestRecord, command: str) -> Iterator[str]:
    """Yield a test's failure: the cause, the growth by line, and the command that accepts it."""
    if record.broken:
        yield from _bounded_table(statement_lines(record.broken))
    elif record.out_of_memory is not None:
        yield record.out_of_memory["sentence"]
    if _can_be_accepted(record):
        missing = all(verdict.limit is None for verdict in record.broken)
        verb = "record" if missing else "accept"
        yield f"{verb} it: {accepting(record.nodeid, command)}"


def _bounded_table(lines: Iterable[str]) -> Iterator[str]:
    """Yield ``lines``, with only the first lines of a table."""
    table: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("  "):
            table.append(line)
            continue
        yield from explained(table)
        table = []
        if line:
            yield line


def explained(lines: Sequence[str]) -> Iterator[str]:
    """Yield the first lines of an explanation, and the number of the remaining ones."""
    yield from lines[:MOST_LINES]
    if len(lines) > MOST_LINES:
        yield f"  and {counted(len(lines) - MOST_LINES, 'more line')}"


def _can_be_accepted(record: TestRecord) -> bool:
    return any(verdict.kind == "baseline" for verdict in record.broken)


def accepting(nodeid: str, command: str) -> str:
    """Return the command that records a test's baseline, or its module's if the id is long."""
    own = update_command(nodeid, command)
    return own if len(own) <= MOST_COMMAND else update_command(nodeid.partition("::")[0], command)


def _improvement(record: TestRecord) -> tuple[str, ...]:
    found = record.improvements[0]
    phase = f"{code(found.phase)} " if found.phase else ""
    return (
        code(record.nodeid),
        f"{phase}{format_size(found.actual)}",
        format_size(found.reference),
        change_text(found.reference, found.actual),
    )


KINDS = {
    "regression": "grew",
    "improvement": "fell",
    "new": "new",
    "gone": "gone",
    "failed": "failed",
}
"""Words for the statuses, in the order of output; a failed test has no peak to compare."""


def difference_section(
    before: Sequence[TestRecord], now: Sequence[TestRecord], name: str
) -> Iterator[str]:
    """Yield the Markdown of the changes since ``before``, which is called ``name``.

    Peaks are compared within one environment, the largest growth first. Environments in which one
    of the two runs has no tests are left out.
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
    compared = (one for key in sorted(old & new) for one in compare_environments(*sides, key, key))
    found = [pair for one in compared if (pair := _difference(one))]
    if not found:
        yield f"**Against {code(name)}**: no peak changed."
        return
    found.sort(key=_order)
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
    """Return the test with its peak's row, ``None`` if the peaks are equal."""
    row = next((row for row in test.rows if not row.phase), None)
    if row is None or row.status == "same" or (row.a, row.b) == (None, None):
        return None
    if row.status == "failed" and row.b is not None:  # it failed in the run before
        row = Row(row.phase, row.a, row.b, "new")
    return test, row


def _order(one: tuple[Compared, Row]) -> tuple[int, int, str]:
    test, row = one
    return list(KINDS).index(row.status), -abs((row.b or 0) - (row.a or 0)), test.nodeid


def _cells(test: Compared, row: Row) -> tuple[str, ...]:
    name = code(test.nodeid) + (f" (was {code(test.was)})" if test.was else "")
    if row.a is None or row.b is None:
        sizes = ("-" if size is None else format_size(size) for size in (row.a, row.b))
        return name, *sizes, KINDS[row.status]
    return name, format_size(row.a), format_size(row.b), change_text(row.a, row.b)
