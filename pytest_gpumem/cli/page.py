"""``gpumem report --to html``: a JSON report as a page that a browser opens, without a network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.cli.command import Answer, argument
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.report.past import Past
    from pytest_gpumem.report.record import TestRecord


def write(arguments: argparse.Namespace) -> Answer:
    """Write the page; raises ``ValueError`` for bad input."""
    from pytest_gpumem.report.html import write_html
    from pytest_gpumem.report.json_report import read_report, read_usage

    if not arguments.reports:
        raise ValueError("name the report that --gpumem-report json:PATH wrote")
    *earlier, report = arguments.reports
    records = read_report(report)
    path: Path = arguments.output or report.with_suffix(".html")
    for read in arguments.reports:
        if path.resolve() == read.resolve():
            raise ValueError(
                f"the page would replace the report {path}; name another with --output"
            )
    past = _past([*arguments.history, *earlier], report, records)
    written = write_html(path, records, "--output", past=past, usage=read_usage(report))
    tests = "1 test" if len(records) == 1 else f"{len(records)} tests"
    size = written.stat().st_size
    return Answer(
        [f"{path}: {tests}, {format_size(size)}"],
        lambda: {"output": str(path), "tests": len(records), "bytes": size},
    )


def _past(paths: Sequence[Path], report: Path, records: Sequence[TestRecord]) -> Past | None:
    """Return the data of earlier reports, with ``report`` at the end; ``None`` without."""
    if not paths:
        return None
    from pytest_gpumem.report.past import past_of_reports, peaks_of

    past = past_of_reports(paths, without=report)
    past.moments.append((report.stem, "", peaks_of(records)))
    return past


ARGUMENTS = (
    argument(
        "--history",
        group="html",
        metavar="PATH",
        action="append",
        default=[],
        type=Path,
        help="an earlier report, or a folder of them, by their names; may be repeated",
    ),
)
