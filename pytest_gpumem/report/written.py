"""The reports that a run writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.option_values import ReportTarget
    from pytest_gpumem.report.record import ReportedRun


def write(target: ReportTarget, run: ReportedRun) -> Sequence[str]:
    """Write one report and return the lines that the terminal has to show for it.

    Raises :class:`~pytest_gpumem.report.json_report.ReportError` where it cannot be written.
    """
    path = target.path
    if target.kind == "github":
        from pytest_gpumem.report.github import workflow_commands, write_summary

        write_summary(run)
        return workflow_commands(run)
    assert path is not None
    if target.kind == "json":
        from pytest_gpumem.report.json_report import write_report

        write_report(path, run.records, run.usage)
    elif target.kind == "html":
        from pytest_gpumem.report.html.page import write_html

        write_html(path, run.records, usage=run.usage)
    else:
        from pytest_gpumem.report.json_report import write_file
        from pytest_gpumem.report.markdown import document

        text = document(run.records, command=run.command, skipped=run.skipped)
        write_file(path, text.encode(), "--gpumem-report markdown:PATH")
    return ()
