"""Failures in pytest's own sections, FAILURES and the short summary, each cause once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest._code.code import ReprFileLocation
from _pytest._io import TerminalWriter

from pytest_gpumem.attribution.explanation import folded
from pytest_gpumem.baseline.collected import function_of
from pytest_gpumem.baseline.store import split_nodeid
from pytest_gpumem.baseline.verdict import Verdict, failure_text, main_verdict
from pytest_gpumem.report.causes import alike, keys_of, places_of
from pytest_gpumem.report.commands import Command
from pytest_gpumem.report.pytest_reports import without_group
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import Line, counted, listed, shorten, wrap, write_lines

LEAST_ALIKE = 3
"""The smallest number of failures of one cause that are merged."""

MOST_FUNCTIONS = 6
"""The most test functions that are named for one cause."""

WIDE = 160
"""The terminal width from which on sentences are not wrapped, as in pytest's own output."""

SECTION = "gpumem"
"""The name of the section with additional facts in a test's report."""

_REMEDIES = ("accept it: ", "record it: ")


@dataclass(frozen=True)
class Failure:
    """A test that failed by its memory, or because its baseline or prediction is missing."""

    nodeid: str
    broken: tuple[Verdict, ...] = ()
    sentence: str = ""

    @property
    def keys(self) -> list[object]:
        """The keys of its causes; failures that share one have the same cause."""
        return keys_of(self.broken) if self.broken else [self.sentence]

    @property
    def brief(self) -> str:
        """A few words with the exceeding number."""
        return main_verdict(self.broken).brief if self.broken else self.sentence

    def text(self, command: Command, *, every: bool, width: int) -> str:
        """Return the failure's text; lines outside tables are not wrapped yet."""
        if not self.broken:
            return self.sentence
        update = command.records(self.nodeid)
        return failure_text(self.broken, update, every=every, width=width)


@contextmanager
def merged(reporter: pytest.TerminalReporter, failures: Mapping[str, Failure]) -> Iterator[None]:
    """Merge ``failures`` of one cause, by node id, while pytest writes its summary.

    With ``-vv`` each is shown by itself; so are fewer than :data:`LEAST_ALIKE` of a cause.
    """
    command, verbosity = Command.of(reporter.config), reporter.config.get_verbosity()
    failed: list[Any] = reporter.stats.get("failed", [])
    ours = [(report, failures.get(without_group(report.nodeid))) for report in failed]
    own = [
        (report, failure)
        for report, failure in ours
        if failure is not None and report.when == "call" and not hasattr(report, "context")
    ]
    found = alike([[failure.nodeid] if verbosity > 1 else failure.keys for _, failure in own])
    groups: list[list[tuple[Any, Failure]]] = []
    for positions in found:
        group = [own[position] for position in positions]
        merges = len(group) >= LEAST_ALIKE or not group[0][1].broken
        groups += [group] if merges else [[one] for one in group]
    hidden = {id(report) for group in groups for report, _ in group[1:]}
    writer = reporter.config.get_terminal_writer()
    shown = {id(report): copy(report) for report in failed if id(report) not in hidden}
    for (report, failure), *more in groups:
        others = [other for _, other in more]
        lines = _lines(failure, others, command, verbosity, writer.fullwidth)
        shown[id(report)].longrepr = _MergedLongrepr(report.longrepr, lines, failure)
    for report in shown.values():
        report.sections = [
            (name, _within(text, writer.fullwidth) if name == SECTION else text)
            for name, text in report.sections
        ]
    reporter.stats["failed"] = list(shown.values())
    try:
        yield
    finally:
        reporter.stats["failed"] = failed
        if not failed:
            del reporter.stats["failed"]
    if reporter.hasopt("f") and not getattr(reporter, "no_summary", False):
        counted = [[failure for _, failure in group] for group in groups]
        write_lines(writer, _summary_lines(counted, writer.fullwidth))


def _within(text: str, width: int) -> str:
    """Return ``text`` with sentences wrapped to ``width`` columns, and tables unchanged."""
    lines: list[str] = []
    for line in text.split("\n"):
        is_table = "  " in line.strip()
        if is_table or len(line) <= width or width >= WIDE:
            lines.append(line)
        else:
            lines += wrap(line, width, first="  " * line.startswith("  "), rest="    ")
    return "\n".join(lines)


class _MergedLongrepr:
    """A replacement of a report's ``longrepr`` while pytest writes its summary."""

    def __init__(self, longrepr: Any, lines: Sequence[Line], failure: Failure) -> None:
        self._longrepr = longrepr
        self._lines = lines
        crash = getattr(longrepr, "reprcrash", None)
        path, line = getattr(crash, "path", ""), getattr(crash, "lineno", 0)
        self.reprcrash = ReprFileLocation(path, line, failure.brief)

    def toterminal(self, writer: TerminalWriter) -> None:
        write_lines(writer, self._lines)

    def __str__(self) -> str:
        return str(self._longrepr)


def _lines(
    failure: Failure, more: Sequence[Failure], command: Command, verbosity: int, width: int
) -> list[Line]:
    text = failure.text(command, every=verbosity > 1, width=width).split("\n")
    lines: list[Line] = []
    for line in text:
        if line.startswith(("  ", *_REMEDIES)) or width >= WIDE:
            lines.append(Line.of(line))  # a table, a command to copy, or a wide terminal
        else:
            lines += [Line.of(part, "red") for part in wrap(line, width, rest="    ")]
    if more:
        lines += _more(failure, more, verbosity, width)
    return lines


def _more(failure: Failure, more: Sequence[Failure], verbosity: int, width: int) -> Iterator[Line]:
    """Yield lines on the other tests with the same cause, and by how much they failed."""
    verdicts = [main_verdict(one.broken) for one in (failure, *more) if one.broken]
    count = len(folded(verdicts[0].explanation)) if verdicts else 0
    same = f"the same {count} line{'s' * (count > 1)}" if count else "the same"
    if len({places_of(one, every=True) for one in verdicts}) > 1:
        same = "the same cause"
    text = f"{same} in {counted(len(more), 'more test')}{_range(failure, more)}:"
    if verbosity > 0:
        yield from map(Line.of, wrap(text, width, rest="    "))
        for other in more:
            yield Line.of(shorten(f"  {other.nodeid}  {other.brief}", width))
        return
    counts = Counter(function_of(other.nodeid) for other in more)
    names = [
        name if number == 1 else f"{name} ({number})"
        for name, number in list(counts.items())[:MOST_FUNCTIONS]
    ]
    if rest := list(counts.values())[MOST_FUNCTIONS:]:
        names.append(f"{sum(rest)} of {len(rest)} other functions")
    yield from map(Line.of, wrap(f"{text} {listed(names)}", width, rest="    "))


def _range(failure: Failure, more: Sequence[Failure]) -> str:
    """Return the range of bytes by which the tests are over; empty if they agree."""
    verdicts = [main_verdict(one.broken) for one in (failure, *more) if one.broken]
    sizes = sorted(abs(verdict.excess) for verdict in verdicts)
    if not sizes or sizes[0] == sizes[-1] or verdicts[0].limit is None:
        return ""
    side = "over" if verdicts[0].excess > 0 else "under"
    least, most = (format_size(size) for size in (sizes[0], sizes[-1]))
    return f", {least} to {most} {side}"


def _summary_lines(groups: Iterable[Sequence[Failure]], width: int) -> Iterator[Line]:
    for group in groups:
        if len(group) > 1:
            name = split_nodeid(group[0].nodeid)[1]
            by = _range(group[0], group[1:]).removeprefix(", ") or group[0].brief
            text = f"FAILED {len(group) - 1} more like {name} - {by}"
            yield Line.of(shorten(text, width), "red")
