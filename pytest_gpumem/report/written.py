"""The reports that a run writes: one line of a table for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.option_values import ReportTarget
    from pytest_gpumem.report.record import ReportedRun


def write(target: ReportTarget, run: ReportedRun) -> Sequence[str]:
    """Write one report and return the lines that the terminal has to show for it.

    Raises :class:`~pytest_gpumem.report.json_report.ReportError` where it cannot be written.
    """
    return WRITERS[target.kind](target.path, run)


def _json(path: Path | None, run: ReportedRun) -> Sequence[str]:
    from pytest_gpumem.report.json_report import write_report

    assert path is not None
    write_report(path, run.records, run.usage)
    return ()


def _html(path: Path | None, run: ReportedRun) -> Sequence[str]:
    from pytest_gpumem.report.html import write_html

    assert path is not None
    write_html(path, run.records, usage=run.usage)
    return ()


def _markdown(path: Path | None, run: ReportedRun) -> Sequence[str]:
    from pytest_gpumem.report.json_report import write_file
    from pytest_gpumem.report.markdown import document

    assert path is not None
    text = document(run.records, command=run.command, skipped=run.skipped)
    write_file(path, text.encode(), "--gpumem-report markdown:PATH")
    return ()


def _github(path: Path | None, run: ReportedRun) -> Sequence[str]:
    from pytest_gpumem.report.github import workflow_commands, write_summary

    write_summary(run)
    return workflow_commands(run)


WRITERS: Mapping[str, Callable[[Path | None, ReportedRun], Sequence[str]]] = {
    "json": _json,
    "html": _html,
    "markdown": _markdown,
    "github": _github,
}
