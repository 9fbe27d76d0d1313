"""The HTML report, ``--gpumem-report html:PATH`` and ``gpumem html``: one file, opened offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_gpumem.report.html.page import render
from pytest_gpumem.report.json_report import write_file
from pytest_gpumem.report.record import TestRecord


def write_html(
    path: Path, records: Sequence[TestRecord], asked_by: str = "--gpumem-report html:PATH"
) -> Path:
    """Write the page of ``records`` to ``path``, whole or not at all; return the file written.

    ``asked_by`` is what named the file. Raises
    :class:`~pytest_gpumem.report.json_report.ReportError` where it cannot be written.
    """
    return write_file(path, render(records).encode(), asked_by)
