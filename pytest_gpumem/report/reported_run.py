"""A run as reports tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpumem.report.record import TestRecord


@dataclass(frozen=True)
class ReportedRun:
    """What a report is made of."""

    records: Sequence[TestRecord]
    root: Path
    """To which the files of tests are relative."""
    lines: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """By node id, a test's file and line, the first being 1."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """By node id, why a test could not be simulated."""
    usage: Sequence[Mapping[str, Any]] = ()
    """How tests shared devices, as the JSON report has it."""
    command: str = "pytest"
    """How pytest is started, as far as baselines depend on it."""
