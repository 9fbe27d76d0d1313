"""``gpumem html REPORT``: a JSON report as a page that a browser opens, without a network."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpumem.cli.columns import say
from pytest_gpumem.sizes import format_size


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "html",
        help="turn a JSON report into a page to look at",
        description="Write the page that --gpumem-report html:PATH writes, of a report of an "
        "earlier run. It is one file that asks the network for nothing.",
    )
    parser.add_argument(
        "report", metavar="REPORT", type=Path, help="what --gpumem-report json:PATH wrote"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: beside the report, with the suffix .html)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and return the exit code; raises ``ValueError`` for bad input."""
    from pytest_gpumem.report.html import write_html
    from pytest_gpumem.report.json_report import read_report

    records = read_report(arguments.report)
    path: Path = arguments.output or arguments.report.with_suffix(".html")
    if path.resolve() == arguments.report.resolve():
        raise ValueError(f"the page would replace the report {path}; name another with --output")
    written = write_html(path, records, "--output")
    tests = "1 test" if len(records) == 1 else f"{len(records)} tests"
    say([f"{path}: {tests}, {format_size(written.stat().st_size)}"])
    return 0
