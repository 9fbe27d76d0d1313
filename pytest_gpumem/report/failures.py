"""Failures where pytest's users look for them, each cause once: FAILURES and the short summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_gpumem.baseline.explanation import folded
from pytest_gpumem.baseline.failure import brief_text, failure_text, listed
from pytest_gpumem.baseline.store import split_nodeid
from pytest_gpumem.baseline.verdict import Verdict
from pytest_gpumem.report.commands import Command
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.text import Line, Writer, shorten, wrap, write_lines
from pytest_gpumem.sizes import format_size

LEAST_ALIKE = 3
"""Failures of one cause that are told as one."""

CHIEFLY = 0.8
"""The part of a change that tells its cause."""

MOST_FUNCTIONS = 6
"""Test functions that are named of those that failed for the same reason."""

WIDE = 160
"""Columns from which on a sentence is left to the terminal, as pytest does with all others."""

_REMEDIES = ("accept it: ", "record it: ")


@dataclass(frozen=True)
class Failure:
    """One test that failed by its memory, or for want of what it is compared with."""

    nodeid: str
    broken: tuple[Verdict, ...] = ()
    sentence: str = ""

    @property
    def cause(self) -> object:
        """What failures of one cause have in common: what changed where, whatever its size."""
        if not self.broken:
            return self.sentence
        first = self.broken[0]
        lines = folded(first.explanation)
        places = _places(lines if first.reference is None else _chief(lines, first.excess))
        compared = first.limit is None, first.reference is None, first.excess > 0
        return first.kind, first.metric, first.phase, first.device, *compared, places

    @property
    def brief(self) -> str:
        """A few words with the number that is over."""
        return brief_text(self.broken) if self.broken else self.sentence

    def text(self, command: Command, *, every: bool, width: int) -> str:
        """Return what it fails with; lines that are no table are not broken yet."""
        if not self.broken:
            return self.sentence
        update = command.records(self.nodeid)
        return failure_text(self.broken, update, every=every, width=width)


def _places(lines: Iterable[Mapping[str, Any]]) -> frozenset[tuple[Any, ...]]:
    keys = ("change", "category", "site", "operator")
    return frozenset(tuple(line.get(key) for key in keys) for line in lines)


def _chief(lines: Sequence[Mapping[str, Any]], excess: int) -> Iterator[Mapping[str, Any]]:
    """Yield the largest of the changes to the side of ``excess``, which are :data:`CHIEFLY` it.

    What the allocator rounds in one test and not in another is no other cause.
    """
    same = [line for line in lines if (line["bytes"] > 0) == (excess > 0)]
    left = CHIEFLY * sum(abs(line["bytes"]) for line in same)
    for line in same:
        if left <= 0:
            return
        yield line
        left -= abs(line["bytes"])


def failures_of(
    records: Mapping[str, TestRecord], sentences: Mapping[str, str]
) -> dict[str, Failure]:
    """Return by node id the tests that failed by their memory; ``sentences`` are of others."""
    found = {
        nodeid: Failure(nodeid, record.broken)
        for nodeid, record in records.items()
        if record.failed
    }
    found.update({nodeid: Failure(nodeid, (), text) for nodeid, text in sentences.items()})
    return found


@contextmanager
def told_once(
    reporter: pytest.TerminalReporter,
    failures: Mapping[str, Failure],
    command: Command,
    verbosity: int,
) -> Iterator[None]:
    """Let pytest write its summary inside, with failures of one cause as one.

    Very verbose, each of them is told by itself; and so are fewer than :data:`LEAST_ALIKE` of a
    cause.
    """
    failed: list[Any] = reporter.stats.get("failed", [])
    ours = [(report, failures.get(_nodeid(report))) for report in failed]
    groups: dict[object, list[tuple[Any, Failure]]] = {}
    for report, failure in ours:
        if failure is not None and report.when == "call" and not hasattr(report, "context"):
            key = failure.nodeid if verbosity > 1 else failure.cause
            groups.setdefault(key, []).append((report, failure))
    groups = dict(_large_enough(groups))
    hidden = {id(report) for group in groups.values() for report, _ in group[1:]}
    writer = reporter.config.get_terminal_writer()
    texts = {id(group[0][0]): group[0][0].longrepr for group in groups.values()}
    for group in groups.values():
        report, failure = group[0]
        more = [other for _, other in group[1:]]
        report.longrepr = _Told(
            report.longrepr, _lines(failure, more, command, verbosity, writer.fullwidth), failure
        )
    reporter.stats["failed"] = [report for report in failed if id(report) not in hidden]
    try:
        yield
    finally:
        reporter.stats["failed"] = failed
        for group in groups.values():
            group[0][0].longrepr = texts[id(group[0][0])]
        if not failed:
            del reporter.stats["failed"]
    if reporter.hasopt("f") and not getattr(reporter, "no_summary", False):
        counted = [[failure for _, failure in group] for group in groups.values()]
        write_lines(writer, _summary_lines(counted, writer.fullwidth))


def _large_enough(
    groups: Mapping[object, list[tuple[Any, Failure]]],
) -> Iterator[tuple[object, list[tuple[Any, Failure]]]]:
    for cause, group in groups.items():
        if len(group) >= LEAST_ALIKE or not group[0][1].broken:
            yield cause, group
        else:
            yield from ((failure.nodeid, [(report, failure)]) for report, failure in group)


class _Told:
    """Stands for a report's ``longrepr`` while pytest writes its summary."""

    def __init__(self, longrepr: Any, lines: Sequence[Line], failure: Failure) -> None:
        self._longrepr = longrepr
        self._lines = lines
        crash = getattr(longrepr, "reprcrash", None)
        self.reprcrash = _Crash(getattr(crash, "path", ""), getattr(crash, "lineno", 0), failure)

    def toterminal(self, writer: Writer) -> None:
        """Write what is to be told."""
        write_lines(writer, self._lines)

    def __str__(self) -> str:
        """As it is without us."""
        return str(self._longrepr)


class _Crash:
    """Where a test failed, and in a few words why."""

    def __init__(self, path: str, lineno: int, failure: Failure) -> None:
        self.path, self.lineno, self.message = path, lineno, failure.brief

    def __str__(self) -> str:
        """As ``--tb=line`` shows it."""
        return f"{self.path}:{self.lineno}: {self.message}"


def _lines(
    failure: Failure, more: Sequence[Failure], command: Command, verbosity: int, width: int
) -> list[Line]:
    text = failure.text(command, every=verbosity > 1, width=width).split("\n")
    lines: list[Line] = []
    for line in text:
        if line.startswith(("  ", *_REMEDIES)) or width >= WIDE:
            lines.append(Line.of(line))  # laid out already, or there to be copied
        else:
            lines += [Line.of(part, "red") for part in wrap(line, width, rest="    ")]
    if more:
        lines += _more(failure, more, verbosity, width)
    return lines


def _more(failure: Failure, more: Sequence[Failure], verbosity: int, width: int) -> Iterator[Line]:
    """Yield which tests failed for the same reason, and by how much."""
    told = [folded(one.broken[0].explanation) if one.broken else [] for one in (failure, *more)]
    count = len(told[0])
    what = f"the same {count} line{'s' * (count > 1)}" if count else "the same"
    if len(set(map(_places, told))) > 1:
        what = "the same cause"
    tests = f"{len(more)} more test{'s' * (len(more) > 1)}"
    text = f"{what} in {tests}{_range(failure, more)}:"
    if verbosity > 0:
        yield from map(Line.of, wrap(text, width, rest="    "))
        for other in more:
            yield Line.of(shorten(f"  {other.nodeid}  {other.brief}", width))
        return
    counts = Counter(_function(other.nodeid) for other in more)
    names = [
        name if number == 1 else f"{name} ({number})"
        for name, number in list(counts.items())[:MOST_FUNCTIONS]
    ]
    if rest := list(counts.values())[MOST_FUNCTIONS:]:
        names.append(f"{sum(rest)} of {len(rest)} other functions")
    yield from map(Line.of, wrap(f"{text} {listed(names)}", width, rest="    "))


def _range(failure: Failure, more: Sequence[Failure]) -> str:
    """Return by how much the tests are over, where that is not the same for all."""
    verdicts = [one.broken[0] for one in (failure, *more) if one.broken]
    sizes = sorted(abs(verdict.excess) for verdict in verdicts)
    if not sizes or sizes[0] == sizes[-1] or verdicts[0].kind == "nothing_measured":
        return ""
    if verdicts[0].limit is None:
        return ""
    side = "over" if verdicts[0].excess > 0 else "under"
    least, most = (format_size(size, decimal=verdicts[0].decimal) for size in (sizes[0], sizes[-1]))
    return f", {least} to {most} {side}"


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _summary_lines(groups: Iterable[Sequence[Failure]], width: int) -> Iterator[Line]:
    for group in groups:
        if len(group) > 1:
            name = split_nodeid(group[0].nodeid)[1]
            by = _range(group[0], group[1:]).removeprefix(", ") or group[0].brief
            text = f"FAILED {len(group) - 1} more like {name} - {by}"
            yield Line.of(shorten(text, width), "red")


def _nodeid(report: Any) -> str:
    from pytest_gpumem.session.reported import without_group

    return without_group(report.nodeid)
