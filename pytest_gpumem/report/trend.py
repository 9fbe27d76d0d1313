"""A test's peak over time: its steps, and the growth that crept in between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pytest_gpumem.sizes import Tolerance, parse_tolerance

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.,-=+*#"
"""Bars for a terminal whose encoding lacks the others."""

SMALL = parse_tolerance("1% + 1MiB")
"""A change up to which counts as small, where nothing else is given."""


@dataclass(frozen=True)
class Point:
    """A measurement: its origin, and the peak in bytes."""

    label: str
    """A commit's abbreviated id, or the name of a report."""
    subject: str
    """The commit's subject; empty for a report."""
    peak: int

    @property
    def named(self) -> str:
        """The label with the commit's subject."""
        return f"{self.label} {self.subject}".rstrip()


@dataclass(frozen=True)
class Step:
    """A change by more than the tolerance from one point to the next."""

    point: Point
    """The point that brought the change."""
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
    """The test's own tolerance, up to which no change fails it: small as well, however large."""

    @property
    def first(self) -> int:
        """The oldest peak, in bytes."""
        return self.points[0].peak

    @property
    def last(self) -> int:
        """The newest peak, in bytes."""
        return self.points[-1].peak

    @property
    def steps(self) -> tuple[Step, ...]:
        """The changes by more than the tolerance, the oldest first."""
        return tuple(Step(point, before) for point, before in self._changes(small=False))

    @property
    def creeping(self) -> tuple[Point, ...]:
        """The points that grew within the tolerance."""
        return tuple(point for point, before in self._changes(small=True) if point.peak > before)

    @property
    def crept(self) -> int:
        """The sum of all changes within the tolerance, in bytes; steps are left out."""
        return sum(point.peak - before for point, before in self._changes(small=True))

    @property
    def level(self) -> int:
        """The test's peak without the creep, in bytes."""
        return self.last - self.crept

    def creeps(self, most: Tolerance) -> bool:
        """Return whether two or more small steps come to more than ``most`` of the level."""
        return len(self.creeping) > 1 and self.crept > most.allowance(max(self.level, 0))

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

    def _changes(self, *, small: bool) -> list[tuple[Point, int]]:
        found = []
        tolerances = [one for one in (self.tolerance, self.own) if one is not None]
        for before, now in pairwise(self.points):
            change = abs(now.peak - before.peak)
            peak = max(before.peak, 0)
            is_small = change <= max(one.allowance(peak) for one in tolerances)
            if change and is_small == small:
                found.append((now, before.peak))
        return found


def sparkline(values: Sequence[int], width: int, bars: str = BARS) -> str:
    """Return ``values`` as at most ``width`` bars from the lowest to the highest.

    Of values that share a bar the highest is shown, so that no peak is lost. Values that are all
    the same are low bars.
    """
    parts = min(width, len(values))
    edges = [part * len(values) // parts for part in range(parts + 1)]
    shown = [max(values[start:stop]) for start, stop in pairwise(edges)]
    low, high = min(shown), max(shown)
    span = max(high - low, 1)
    return "".join(bars[(value - low) * (len(bars) - 1) // span] for value in shown)
