"""``gpumem html REPORT``: a JSON report as a page that a browser opens, without a network."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpumem.cli.command import Answer, Command, argument
from pytest_gpumem.sizes import format_size


def run(arguments: argparse.Namespace) -> Answer:
    """Write the page; raises ``ValueError`` for bad input."""
    from pytest_gpumem.report.html import write_html
    from pytest_gpumem.report.json_report import read_report

    records = read_report(arguments.report)
    path: Path = arguments.output or arguments.report.with_suffix(".html")
    if path.resolve() == arguments.report.resolve():
        raise ValueError(f"the page would replace the report {path}; name another with --output")
    written = write_html(path, records, "--output")
    tests = "1 test" if len(records) == 1 else f"{len(records)} tests"
    size = written.stat().st_size
    return Answer(
        [f"{path}: {tests}, {format_size(size)}"],
        lambda: {"output": str(path), "tests": len(records), "bytes": size},
    )


COMMAND = Command(
    description="Write the page that --gpumem-report html:PATH writes, of a report of an "
    "earlier run. It is one file that asks the network for nothing.",
    run=run,
    arguments=(
        argument(
            "report", metavar="REPORT", type=Path, help="what --gpumem-report json:PATH wrote"
        ),
        argument(
            "-o",
            "--output",
            metavar="FILE",
            type=Path,
            help="the page (default: beside the report, with the suffix .html)",
        ),
    ),
    examples=("gpumem html report.json -o memory.html",),
)
