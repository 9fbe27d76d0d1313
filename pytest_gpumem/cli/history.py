"""``gpumem history``: each test's peak over reports or commits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_gpumem.baseline.verdict import change_text, format_percent
from pytest_gpumem.cli.command import (
    Answer,
    Argument,
    Command,
    parsed,
    sentences,
    table,
    terminal_width,
)
from pytest_gpumem.progress import Progress
from pytest_gpumem.report.past import (
    BARS,
    PLAIN_BARS,
    SMALL,
    Past,
    Trend,
    past_of_git,
    past_of_reports,
    sparkline,
)
from pytest_gpumem.sizes import Tolerance, format_change, format_size, parse_tolerance
from pytest_gpumem.text import counted

WIDTH = 24
"""Columns of a sparkline."""
MOST_CREEP = "5%"
COLUMNS = ("test", "trend", "first", "last", "change", "%", "steps", "crept")


def run(arguments: argparse.Namespace) -> Answer:
    """Return the history of peaks; raises ``ValueError`` for bad input."""
    most = parsed("--max-creep", parse_tolerance, arguments.max_creep)
    given = arguments.tolerance
    small = SMALL if given is None else parsed("--tolerance", parse_tolerance, given)
    past = past_of(arguments.reports, arguments.git, arguments.baselines, arguments.progress)
    trends = past.trends(small, own=given is None)
    if not trends:
        raise ValueError("no report holds a measured test, so there is no history")
    creeping = [trend for trend in trends if trend.creeps(most)]
    lines = _lines(trends, creeping, most, every=arguments.all, moments=len(past.moments))
    return Answer(
        [*lines, *sentences(f"note: {note}" for note in past.notes)],
        lambda: {
            "tests": [{**trend.to_dict(), "creeps": trend in creeping} for trend in trends],
            "notes": past.notes,
        },
        failed=bool(creeping),
    )


def past_of(
    reports: Sequence[Path], commits: str | None, baselines: Path, progress: Progress
) -> Past:
    """Return the data of the reports, or of the commits with stored ``baselines``.

    Raises ``ValueError`` where that cannot be read.
    """
    if bool(reports) == bool(commits):
        raise ValueError("give either reports or --git RANGE; see gpumem history --help")
    if commits:
        return past_of_git(commits, baselines, progress)
    return past_of_reports(reports, progress)


def _lines(
    trends: Sequence[Trend], creeping: Sequence[Trend], most: Tolerance, every: bool, moments: int
) -> Iterator[str]:
    changed = [trend for trend in trends if trend.range]
    shown = trends if every else changed
    several = len({trend.environment for trend in trends}) > 1
    if shown:
        rows = [COLUMNS, *(_row(trend, several) for trend in shown)]
        yield from table(rows, left=(0, 1), given_up=(5, 2, 6, 7), width=terminal_width())
        yield ""
    for trend in shown:
        if trend.steps:
            yield f"{_name(trend, several)}:"
        for step in trend.steps:
            change, brought = change_text(step.before, step.point.peak), step.point
            yield f"  {change}  {brought.label} {brought.subject}".rstrip()
    for trend in creeping:
        named = ", ".join(point.label for point in trend.creeping)
        yield (
            f"{_name(trend, several)} crept by {change_text(trend.level, trend.last)} in "
            f"{len(trend.creeping)} small steps, more than {most}: {named}"
        )
    yield (
        f"{counted(len(trends), 'test')} at {counted(moments, 'moment')}: "
        f"{len(trends) - len(changed)} never changed, "
        f"{sum(bool(trend.steps) for trend in trends)} with steps, {len(creeping)} creeping"
    )


def _row(trend: Trend, several: bool) -> tuple[str, ...]:
    percent = format_percent(trend.last - trend.first, trend.first) if trend.first > 0 else ""
    change = trend.last - trend.first
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
        bars = BARS
    except UnicodeEncodeError:
        bars = PLAIN_BARS
    return (
        _name(trend, several),
        sparkline([point.peak for point in trend.points], WIDTH, bars),
        format_size(trend.first),
        format_size(trend.last),
        format_change(change),
        percent.removesuffix(" %"),
        str(len(trend.steps)),
        format_change(trend.crept),
    )


def _name(trend: Trend, several: bool) -> str:
    return f"{trend.nodeid} [{trend.environment}]" if several else trend.nodeid


PAST_IN_GIT = (
    Argument("--git RANGE", "the baselines that a range of commits stored: v1.0..HEAD"),
    Argument("--baselines DIR", "for --git", type=Path, default=Path("baselines")),
)
"""The arguments of every command that reads stored baselines of commits."""

COMMAND = Command(
    description="Show each test's peaks as a trend, its steps with the commit of each, and "
    "the growth by steps too small to fail a test. Exit code 1 where that growth is more than "
    "--max-creep.",
    run=run,
    arguments=(
        Argument(
            "reports REPORT",
            "JSON reports, the oldest first, or folders of them, by their names",
            nargs="*",
            type=Path,
        ),
        *PAST_IN_GIT,
        Argument(
            "--max-creep TOLERANCE",
            f"how much small steps may add up to (default: {MOST_CREEP})",
            default=MOST_CREEP,
        ),
        Argument(
            "--tolerance TOLERANCE",
            f"the largest change that is a small step (default: {SMALL}, or the test's own "
            "tolerance where that is more)",
        ),
        Argument("--all", "list tests that never changed, too"),
    ),
    examples=("gpumem history reports/", "gpumem history --git v1.0..HEAD --max-creep 3%"),
)
