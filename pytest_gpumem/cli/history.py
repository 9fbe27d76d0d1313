"""``gpumem history``: how each test's peak went over reports or commits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_gpumem.baseline.verdict import format_percent
from pytest_gpumem.cli.columns import say, table, terminal_width
from pytest_gpumem.report.past import past_of_git, past_of_reports
from pytest_gpumem.report.trend import BARS, PLAIN_BARS, SMALL, Trend, sparkline
from pytest_gpumem.sizes import SizeError, Tolerance, format_size, parse_tolerance

CREEPS = 1
WIDTH = 24
"""Columns of a sparkline."""
MOST_CREEP = "5%"
COLUMNS = ("test", "trend", "first", "last", "change", "%", "steps", "crept")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "history",
        help="how peaks went over reports or commits; exit code 1 on a slow creep",
        description="Show each test's peaks as a trend, the steps in it with the commit that "
        "brought each, and what crept in by steps too small to fail a test. Exit code 1 where that "
        "is more than --max-creep.",
        epilog="examples: gpumem history reports/    gpumem history --git v1.0..HEAD",
    )
    parser.add_argument(
        "reports",
        metavar="REPORT",
        nargs="*",
        type=Path,
        help="JSON reports, the oldest first, or folders of them, by their names",
    )
    parser.add_argument(
        "--git", metavar="RANGE", help="the baselines that a range of commits stored: v1.0..HEAD"
    )
    parser.add_argument(
        "--baselines", metavar="DIR", type=Path, default=Path("baselines"), help="for --git"
    )
    parser.add_argument(
        "--max-creep",
        metavar="TOLERANCE",
        default=MOST_CREEP,
        help=f"what small steps may come to (default: {MOST_CREEP.replace('%', '%%')})",
    )
    parser.add_argument(
        "--tolerance",
        default=str(SMALL),
        help=f"up to what a change is a small step (default: {str(SMALL).replace('%', '%%')})",
    )
    parser.add_argument("--all", action="store_true", help="list tests that never changed, too")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the trends and return the exit code; raises ``ValueError`` for bad input."""
    if bool(arguments.reports) == bool(arguments.git):
        raise ValueError("give either reports or --git RANGE; see gpumem history --help")
    most = _tolerance("--max-creep", arguments.max_creep)
    small = _tolerance("--tolerance", arguments.tolerance)
    past = (
        past_of_git(arguments.git, arguments.baselines)
        if arguments.git
        else past_of_reports(arguments.reports)
    )
    trends = past.trends(small)
    if not trends:
        raise ValueError("no report holds a measured test, so there is no history")
    creeping = [trend for trend in trends if trend.creeps(most)]
    if arguments.json:
        data = [{**trend.to_dict(), "creeps": trend in creeping} for trend in trends]
        print(json.dumps({"tests": data, "notes": past.notes}))
    else:
        say(_lines(trends, creeping, most, every=arguments.all, moments=len(past.moments)))
        say(f"note: {note}" for note in past.notes)
    return CREEPS if creeping else 0


def _lines(
    trends: Sequence[Trend],
    creeping: Sequence[Trend],
    most: Tolerance,
    *,
    every: bool,
    moments: int,
) -> Iterator[str]:
    shown = [trend for trend in trends if every or len({point.peak for point in trend.points}) > 1]
    several = len({trend.environment for trend in trends}) > 1
    if shown:
        rows = [_row(trend, several) for trend in shown]
        yield from table(
            [COLUMNS, *rows], left=(0, 1), given_up=(5, 2, 6, 7), width=terminal_width()
        )
        yield ""
    for trend in shown:
        if trend.steps:
            yield f"{_name(trend, several)}:"
        for step in trend.steps:
            yield f"  {_change(step.before, step.point.peak)}  {step.point.named}"
    for trend in creeping:
        named = ", ".join(point.label for point in trend.creeping)
        yield (
            f"{_name(trend, several)} crept by {_change(trend.level, trend.last)} in "
            f"{len(trend.creeping)} small steps, more than {most}: {named}"
        )
    constant = len(trends) - sum(len({p.peak for p in trend.points}) > 1 for trend in trends)
    yield (
        f"{len(trends)} test{'s' * (len(trends) != 1)} at {moments} moments: {constant} never "
        f"changed, {sum(bool(trend.steps) for trend in trends)} with steps, "
        f"{len(creeping)} creeping"
    )


def _row(trend: Trend, several: bool) -> tuple[str, ...]:
    percent = format_percent(trend.last - trend.first, trend.first) if trend.first > 0 else ""
    change = trend.last - trend.first
    return (
        _name(trend, several),
        sparkline([point.peak for point in trend.points], WIDTH, _bars()),
        format_size(trend.first),
        format_size(trend.last),
        _signed(change),
        percent.removesuffix(" %"),
        str(len(trend.steps)),
        _signed(trend.crept),
    )


def _name(trend: Trend, several: bool) -> str:
    return f"{trend.nodeid} [{trend.environment}]" if several else trend.nodeid


def _bars() -> str:
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN_BARS
    return BARS


def _change(before: int, now: int) -> str:
    percent = f" ({format_percent(now - before, before)})" if before > 0 else ""
    return f"{_signed(now - before)}{percent}"


def _signed(change: int) -> str:
    sign = "" if change == 0 else "+" if change > 0 else "-"
    return f"{sign}{format_size(abs(change))}"


def _tolerance(option: str, text: str) -> Tolerance:
    try:
        return parse_tolerance(text)
    except SizeError as error:
        raise ValueError(f"{option}: {error}") from None
