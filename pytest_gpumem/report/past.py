"""A test's peak over time: points from reports or from the baselines of commits, and steps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from pytest_gpumem.baseline.content import BaselineEntry, BaselineError, parse
from pytest_gpumem.paths import git, toplevel
from pytest_gpumem.progress import NOTHING_SHOWN, Progress
from pytest_gpumem.quoting import quoted
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import Tolerance, parse_tolerance

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.,-=+*#"
"""Bars for a terminal whose encoding lacks :data:`BARS`."""

SMALL = parse_tolerance("1% + 1MiB")
"""The default of the largest change that counts as small."""


@dataclass(frozen=True)
class Point:
    """A measurement: its origin, and the peak in bytes."""

    label: str
    """A commit's abbreviated id, or the name of a report."""
    subject: str
    """The commit's subject; empty for a report."""
    peak: int


@dataclass(frozen=True)
class Step:
    """A change by more than the tolerance from one point to the next."""

    point: Point
    """The first point after the change."""
    before: int
    """The peak at the point before, in bytes."""

    @property
    def bytes(self) -> int:
        """The change of the peak in bytes."""
        return self.point.peak - self.before


@dataclass(frozen=True)
class Trend:
    """The points of one test in one environment, the oldest first; at least one."""

    environment: str
    nodeid: str
    points: tuple[Point, ...]
    tolerance: Tolerance
    """The change up to which a step from one point to the next counts as small."""
    own: Tolerance | None = None
    """The test's own tolerance; a change within it counts as small, too."""

    @property
    def first(self) -> int:
        """The oldest peak, in bytes."""
        return self.points[0].peak

    @property
    def last(self) -> int:
        """The newest peak, in bytes."""
        return self.points[-1].peak

    @property
    def range(self) -> int:
        """The bytes between the lowest and the highest peak."""
        peaks = [point.peak for point in self.points]
        return max(peaks) - min(peaks)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The changes by more than the tolerance, the oldest first."""
        return tuple(self._changes(small=False))

    @property
    def creeping(self) -> tuple[Point, ...]:
        """The points that grew within the tolerance."""
        return tuple(step.point for step in self._changes(small=True) if step.bytes > 0)

    @property
    def crept(self) -> int:
        """The sum of all changes within the tolerance, in bytes; steps are left out."""
        return sum(step.bytes for step in self._changes(small=True))

    @property
    def level(self) -> int:
        """The last peak without the sum of small changes, in bytes."""
        return self.last - self.crept

    def creeps(self, most: Tolerance) -> bool:
        """Return whether two or more small steps add up to more than ``most`` of the level."""
        return len(self.creeping) > 1 and self.crept > most.allowance(self.level)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; sizes in bytes."""
        return {
            "environment": self.environment,
            "nodeid": self.nodeid,
            "points": [vars(point) for point in self.points],
            "steps": [
                {"label": step.point.label, "subject": step.point.subject, "bytes": step.bytes}
                for step in self.steps
            ],
            "crept": self.crept,
            "creeping": [point.label for point in self.creeping],
        }

    def _changes(self, *, small: bool) -> Iterator[Step]:
        tolerances = [one for one in (self.tolerance, self.own) if one is not None]
        for before, now in pairwise(self.points):
            change = abs(now.peak - before.peak)
            is_small = change <= max(one.allowance(before.peak) for one in tolerances)
            if change and is_small == small:
                yield Step(now, before.peak)


def sparkline(values: Sequence[int], width: int, bars: str = BARS) -> str:
    """Return ``values`` as at most ``width`` bars from the lowest to the highest.

    A bar for several values shows the highest, so that no peak is lost. Equal values are low bars.
    """
    parts = min(width, len(values))
    edges = [part * len(values) // parts for part in range(parts + 1)]
    shown = [max(values[start:stop]) for start, stop in pairwise(edges)]
    low, high = min(shown), max(shown)
    span = max(high - low, 1)
    return "".join(bars[(value - low) * (len(bars) - 1) // span] for value in shown)


Key = tuple[str, str]
"""Environment key and node id."""
Peaks = Mapping[Key, int]
"""Bytes by environment and test."""


@dataclass
class Past:
    """Measurements at successive moments."""

    moments: list[tuple[str, str, Peaks]] = field(default_factory=list)
    """Label, subject and peaks, the oldest first."""
    tolerances: dict[Key, str | None] = field(default_factory=dict)
    """The newest tolerances of tests."""
    notes: list[str] = field(default_factory=list)
    """Messages on files that could not be read, whose points are missing."""

    def trends(self, tolerance: Tolerance, *, own: bool = True) -> list[Trend]:
        """Return one trend for each test of each environment, sorted.

        Changes within ``tolerance`` count as small; with ``own``, those within a test's newest
        tolerance, too.
        """
        points: dict[Key, list[Point]] = defaultdict(list)
        for label, subject, peaks in self.moments:
            for key, peak in peaks.items():
                points[key].append(Point(label, subject, peak))
        trends = []
        for key, found in sorted(points.items()):
            stated = self.tolerances.get(key) if own else None
            limit = None if stated is None else parse_tolerance(stated)
            trends.append(Trend(*key, tuple(found), tolerance, limit))
        return trends


def past_of_reports(
    paths: Sequence[Path], progress: Progress = NOTHING_SHOWN, *, without: Path | None = None
) -> Past:
    """Return the data of JSON reports, in the order given; those of a folder by their names.

    The report ``without`` is left out if a folder contains it.

    Raises ``ValueError`` with one sentence where one cannot be read or there is none.
    """
    past = Past()
    files = [file for path in paths for file in _reports(path, without)]
    progress.expect(len(files))
    for file in files:
        records = read_report(file)
        past.moments.append((file.stem, "", peaks_of(records)))
        past.tolerances |= {one.key: one.expectation.get("tolerance") for one in records}
        progress.step()
    return past


def _reports(path: Path, without: Path | None) -> list[Path]:
    if not path.is_dir():
        return [path]
    if found := sorted(path.glob("*.json"), key=_natural):
        return [file for file in found if without is None or file.resolve() != without.resolve()]
    raise ValueError(f"{path} holds no reports; give files of --gpumem-report json:PATH")


def past_of_git(revisions: str, baselines: Path, progress: Progress = NOTHING_SHOWN) -> Past:
    """Return the content of the folder ``baselines`` at each commit of a range that changed it.

    ``revisions`` is an argument of ``git rev-list``, such as ``v1.0..HEAD``; merged branches count
    as one commit. The baselines before the first commit are the first point. Raises ``ValueError``
    with one sentence if the range does not exist or no baselines were stored in it.
    """
    baselines = baselines.resolve()
    existing = next(folder for folder in (baselines, *baselines.parents) if folder.is_dir())
    top = toplevel(existing)
    inside = PurePosixPath(baselines.relative_to(top.resolve()))
    shape = ("--first-parent", "--reverse", "--format=%H %h %P%x00%s")
    where = ("--end-of-options", revisions, "--", f":(literal){inside}")
    listed = git(top, "log", *shape, *where).decode(errors="replace")
    past, reader = Past(), _Reader(top, str(inside))
    commits = list(filter(None, listed.split("\n")))
    progress.expect(len(commits))
    for position, line in enumerate(commits):
        ids, _, subject = line.partition("\0")
        commit, label, *parents = ids.split()
        if position == 0 and parents:
            past.moments.append((f"{label}~1", "", reader.peaks(parents[0], past.notes)))
        past.moments.append((label, subject, reader.peaks(commit, past.notes)))
        progress.step()
    if not any(peaks for _, _, peaks in past.moments):
        raise ValueError(
            f"no commit of {quoted(revisions)} stored baselines in {baselines}; give a longer "
            "range, or --baselines the folder that holds them"
        )
    past.tolerances = reader.tolerances
    past.notes = list(dict.fromkeys(past.notes))
    return past


class _Reader:
    """A reader of commits' baselines; an unchanged file is read once."""

    def __init__(self, top: Path, folder: str) -> None:
        self._top, self._folder = top, folder
        self._known: dict[str, dict[Key, BaselineEntry]] = {}
        self.tolerances: dict[Key, str | None] = {}
        """Tolerances of tests at the last commit that has them."""

    def peaks(self, commit: str, notes: list[str]) -> Peaks:
        """Return all peaks stored in ``commit``; ``notes`` gets messages on unreadable files."""
        found: dict[Key, int] = {}
        tree = git(self._top, "ls-tree", "-r", "-z", commit, "--", f"{self._folder}/")
        for entry in tree.decode(errors="surrogateescape").split("\0"):
            facts, _, name = entry.partition("\t")
            if not name.endswith(".json") or not facts.startswith("100"):
                continue
            blob = facts.split()[2]
            if blob not in self._known:
                try:
                    self._known[blob] = self._file(name, blob)
                except BaselineError as error:
                    self._known[blob] = {}
                    notes.append(f"left out of commit {commit[:9]}: {error}")
            for key, stored in self._known[blob].items():
                found[key], self.tolerances[key] = stored.peak_allocated, stored.tolerance
        return found

    def _file(self, name: str, blob: str) -> dict[Key, BaselineEntry]:
        inside = PurePosixPath(name).relative_to(self._folder)
        folder, *module = inside.parts
        stored = parse(Path(name), git(self._top, "cat-file", "blob", blob), folder)
        path = PurePosixPath(*module).as_posix().removesuffix(".json")
        return {(folder, f"{path}::{name}"): entry for name, entry in stored.tests.items()}


def peaks_of(records: Sequence[TestRecord]) -> Peaks:
    """Return the peaks of tests whose whole body was measured."""
    return {
        record.key: record.measurement.peak_allocated
        for record in records
        # Numbers of a failed body do not cover the whole body.
        if record.measurement is not None and record.is_whole
    }


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort ``report-9`` before ``report-10``."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", path.name)]
