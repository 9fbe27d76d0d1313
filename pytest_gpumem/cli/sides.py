"""The input of ``gpumem compare``: the numbers of a report or a baselines folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.baseline.store import BaselineEntry, read_folder, split_nodeid
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import Tolerance, parse_tolerance
from pytest_gpumem.values.environment import Environment

Figures = Mapping[str, int]
"""Peaks in bytes by phase, the whole test's under the empty name; empty for a failed test."""

Sites = Callable[[str], Sequence[Site]]
"""Lookup of the live sites, by the names of :data:`Figures`."""


@dataclass(frozen=True)
class Test:
    """The data of one side on one test."""

    figures: Figures
    tolerance: Tolerance | None = None
    """The test's own, by marker, option or ini; ``None`` where its environment's applies."""
    sites: Sites = lambda phase: ()
    """The holders of the bytes at each of these peaks; empty where not recorded."""


@dataclass
class Side:
    """A side of a comparison."""

    path: Path
    environments: dict[str, Environment] = field(default_factory=dict)
    tests: dict[str, dict[str, Test]] = field(default_factory=dict)
    """Tests by environment key and node id."""

    def add(
        self,
        environment: Environment,
        nodeid: str,
        figures: Figures,
        tolerance: str | None,
        sites: Sites,
    ) -> None:
        """Add a test."""
        self.environments[environment.key] = environment
        own = parse_tolerance(tolerance) if tolerance is not None else None
        self.tests.setdefault(environment.key, {})[nodeid] = Test(figures, own, sites)


def read_side(path: Path) -> Side:
    """Return the content of ``path``: a baselines folder or a JSON report.

    Raises ``ValueError`` with one sentence where it is neither.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a JSON report or a baselines folder")
    return _folder_side(path) if path.is_dir() else _report_side(path)


def _folder_side(path: Path) -> Side:
    side = Side(path)
    for module, content in read_folder(path):
        for test_id, entry in content.tests.items():
            figures = {"": entry.peak_allocated, **entry.phases}
            nodeid, sites = f"{module}::{test_id}", partial(_stored, entry)
            side.add(content.environment, nodeid, figures, entry.tolerance, sites)
    return side


def _report_side(path: Path) -> Side:
    side = Side(path)
    for record in read_report(path):
        if record.measurement is not None or record.outcome in ("failed", "error"):
            nodeid, sites = "::".join(split_nodeid(record.nodeid)), partial(_reported, record)
            # The numbers of a body that failed end where it ended.
            figures = _figures(record) if record.is_whole else {}
            tolerance = record.expectation.get("tolerance")
            side.add(record.environment, nodeid, figures, tolerance, sites)
    return side


def _stored(entry: BaselineEntry, phase: str) -> Sequence[Site]:
    peak = entry.peak_of(phase or None)
    return () if peak is None else peak.sites


def _reported(record: TestRecord, phase: str) -> Sequence[Site]:
    measured = record.measurement
    if measured is None or (phase and phase not in measured.phases):
        return ()
    held = measured.phases[phase].sites if phase else measured.sites
    return [Site.from_dict(site) for site in held]


def _figures(record: TestRecord) -> Figures:
    figures = {}
    for position, measurement in enumerate(record.measurements):
        device = f"{measurement.device} " if position else ""
        figures[device.strip()] = measurement.peak_allocated
        for name, phase in measurement.phases.items():
            figures[f"{device}{name}"] = phase.peak_allocated
    return figures
