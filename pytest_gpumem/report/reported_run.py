"""A run as input of reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpumem.report.record import TestRecord


@dataclass(frozen=True)
class ReportedRun:
    """The input of a report."""

    records: Sequence[TestRecord]
    root: Path
    """The folder to which the files of tests are relative."""
    lines: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """File and line of each test by node id; the first line is 1."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """The reason why a test could not be simulated, by node id."""
    usage: Sequence[Mapping[str, Any]] = ()
    """The use of shared devices, in the JSON report's form."""
    command: str = "pytest"
    """pytest's command line, as far as baselines depend on it."""
