"""Two runs or stores of baselines, test by test: their numbers, differences and renamed tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import explain
from pytest_gpumem.baseline.collected import successors
from pytest_gpumem.baseline.compare import default_tolerance_for
from pytest_gpumem.baseline.store import BaselineEntry, read_folder
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import Tolerance, parse_tolerance
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import CALL


@dataclass(frozen=True)
class Test:
    """The data of one side on one test."""

    __test__ = False  # pytest would take the name for a test class

    figures: Mapping[str, int] = field(default_factory=dict)
    """Peaks in bytes by phase, the whole test's under the empty name; empty for a failed test."""
    tolerance: str | None = None
    """The tolerance by marker, option or ini; ``None`` for the default of the environment."""
    held: TestRecord | BaselineEntry | None = None
    """The record of the holders of the bytes at each of these peaks."""

    def sites(self, phase: str) -> Sequence[Site]:
        """Return the holders of the bytes at the peak of ``phase``; empty where not recorded."""
        if isinstance(self.held, BaselineEntry):
            peak = self.held.peak_of(phase or None)
            return () if peak is None else peak.sites
        measured = self.held.measurement if self.held else None
        if measured is None or (phase and phase not in measured.phases):
            return ()
        sites = measured.phases[phase].sites if phase else measured.sites
        return [Site.from_dict(site) for site in sites]


NOTHING = Test()
"""Stands for a test that one side lacks."""


@dataclass
class Side:
    """A side of a comparison."""

    path: Path = Path()
    environments: dict[str, Environment] = field(default_factory=dict)
    tests: dict[str, dict[str, Test]] = field(default_factory=dict)
    """Tests by environment key and node id."""

    @classmethod
    def of(cls, records: Iterable[TestRecord], path: Path = Path()) -> Side:
        """Return the side of a report's ``records``."""
        side = cls(path)
        for record in records:
            if record.measurement is not None or record.outcome in ("failed", "error"):
                # Numbers of a failed body do not cover the whole body.
                figures = _figures(record) if record.is_whole else {}
                own = record.expectation.get("tolerance")
                test = Test(figures, own, record)
                side._add(record.environment, record.key[1], test)
        return side

    @classmethod
    def read(cls, path: Path) -> Side:
        """Return the content of ``path``: a baselines folder or a JSON report.

        Raises ``ValueError`` with one sentence where it is neither.
        """
        if not path.exists():
            raise ValueError(f"{path} does not exist; give a JSON report or a baselines folder")
        if not path.is_dir():
            return cls.of(read_report(path), path)
        side = cls(path)
        for module, content in read_folder(path):
            for test_id, entry in content.tests.items():
                figures = {"": entry.peak_allocated, **entry.phases}
                test = Test(figures, entry.tolerance, entry)
                side._add(content.environment, f"{module}::{test_id}", test)
        return side

    def _add(self, environment: Environment, nodeid: str, test: Test) -> None:
        self.environments[environment.key] = environment
        self.tests.setdefault(environment.key, {})[nodeid] = test


def _figures(record: TestRecord) -> Mapping[str, int]:
    figures = {}
    for position, measurement in enumerate(record.measurements):
        device = f"{measurement.device} " if position else ""
        figures[device.strip()] = measurement.peak_allocated
        for name, phase in measurement.phases.items():
            if name != CALL:  # as in baselines: it would repeat the whole test's number
                figures[f"{device}{name}"] = phase.peak_allocated
    return figures


@dataclass(frozen=True)
class Row:
    """A compared number, in bytes; ``None`` on the side that lacks it."""

    phase: str
    a: int | None
    b: int | None
    status: str
    """``regression``, ``improvement``, ``same``, ``new``, ``gone`` or ``failed``."""

    @property
    def change(self) -> int | None:
        """B's number minus A's; ``None`` where one of them has no number."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def is_equal(self) -> bool:
        """Whether both have the same number."""
        return self.status == "same" and self.a == self.b


@dataclass(frozen=True)
class Compared:
    """A test that both sides, or one of them, contain."""

    nodeid: str
    environment: str
    """The key of B's environment."""
    rows: tuple[Row, ...]
    sides: tuple[Test, Test]
    """The test's data in A and B."""
    tolerance: str
    """The test's own tolerance."""
    was: str | None
    """The node id in A, if it differs."""
    suffix: str
    """The environment of A, if A has several."""

    @property
    def shown(self) -> str:
        """The node id with the environment and the former node id, for display."""
        was = f" (was {self.was})" if self.was else ""
        return f"{self.nodeid}{was}{self.suffix}"

    def changes(self, row: Row) -> list[dict[str, Any]]:
        """Return the sites whose bytes differ; empty if one side has no sites."""
        a, b = (side.sites(row.phase) for side in self.sides)
        return [change.to_dict() for change in explain(b, a)] if a and b and row.change else []


def compare_environments(
    a: Side, b: Side, key_a: str, key_b: str, tolerance: Tolerance | None = None
) -> Iterator[Compared]:
    """Yield the tests of one environment of each side, in order.

    Without a ``tolerance``, the tolerance of each test in B, else in A, applies; if it has none,
    the default of the environments, which is exact only if both are simulated or dry.
    """
    exact = a.environments[key_a].is_exact and b.environments[key_b].is_exact
    before, after = a.tests[key_a], b.tests[key_b]
    gone, new = (
        {nodeid: tuple(sorted(one[nodeid].figures.items())) for nodeid in sorted(one.keys() - two)}
        for one, two in ((before, after.keys()), (after, before.keys()))
    )
    earlier = {now: old for old, (now, _) in successors(gone, new).items()}
    for nodeid in sorted((before.keys() | after.keys()) - set(earlier.values())):
        old = earlier.get(nodeid, nodeid)
        pair = before.get(old, NOTHING), after.get(nodeid, NOTHING)
        known = [test.tolerance for test in reversed(pair) if test.tolerance is not None]
        own = parse_tolerance(known[0]) if known and tolerance is None else None
        allowed = tolerance or own or default_tolerance_for(exact)
        yield Compared(
            nodeid,
            key_b,
            tuple(_rows(pair, (old in before, nodeid in after), allowed)),
            pair,
            "" if own is None else str(own),
            old if old != nodeid else None,
            f" [{key_a}]" if len(a.tests) > 1 else "",
        )


def _rows(
    pair: tuple[Test, Test], present: tuple[bool, bool], tolerance: Tolerance
) -> Iterator[Row]:
    before, after = (test.figures for test in pair)
    if any(there and not test.figures for there, test in zip(present, pair, strict=True)):
        yield Row("", before.get(""), after.get(""), "failed")
        return
    for phase in {**before, **after}:
        a, b = before.get(phase), after.get(phase)
        if a is None or b is None:
            yield Row(phase, a, b, "new" if a is None else "gone")
            continue
        allowance = tolerance.allowance(a)
        more = "regression" if b > a + allowance else "same"
        yield Row(phase, a, b, "improvement" if b < a - allowance else more)
