"""The HTML report, ``--gpumem-report html:PATH`` and ``gpumem report``: one offline file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.report.html.page import render, render_recording
from pytest_gpumem.report.json_report import write_file
from pytest_gpumem.report.record import TestRecord

if TYPE_CHECKING:
    from pytest_gpumem.allocator.replayed import ReplayResult
    from pytest_gpumem.report.html.recording import Watchers
    from pytest_gpumem.report.past import Past


def write_html(
    path: Path,
    records: Sequence[TestRecord],
    asked_by: str = "--gpumem-report html:PATH",
    *,
    past: Past | None = None,
    usage: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the page of ``records`` to ``path``, whole or not at all; return the file written.

    ``asked_by`` is the option that named the file. ``past`` has the peaks of earlier runs and at
    its end those of this one, ``usage`` is the use of shared devices, as in a JSON report. Raises
    :class:`~pytest_gpumem.report.json_report.ReportError` where it cannot be written.
    """
    return write_file(path, render(records, past, usage).encode(), asked_by)


def write_recording(
    path: Path,
    name: str,
    result: ReplayResult,
    watchers: Watchers,
    *,
    notes: Sequence[str],
    used_elsewhere: int,
) -> Path:
    """Write the page of a replayed snapshot to ``path``, whole or not at all; return the file.

    ``watchers`` followed the replay; ``notes`` are sentences to show above all else. Raises
    :class:`~pytest_gpumem.report.json_report.ReportError` where it cannot be written.
    """
    from pytest_gpumem.report.html.recording import recording_of

    data, packed = recording_of(name, result, watchers, notes=notes, used_elsewhere=used_elsewhere)
    return write_file(path, render_recording(data, packed).encode(), "--html")
