"""``gpumem report --to markdown``: the comment for a pull request."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpumem.cli.command import Answer, argument
from pytest_gpumem.report.difference import difference_section
from pytest_gpumem.report.json_report import read_report, write_file
from pytest_gpumem.report.markdown import document


def write(arguments: argparse.Namespace) -> Answer:
    """Write the Markdown; raises ``ValueError`` for bad input."""
    if len(arguments.reports) != 1:
        raise ValueError("--to markdown is of one report; what it is compared with is --against")
    records = read_report(arguments.reports[0])
    sections: list[str] = []
    if arguments.against is not None:
        base = read_report(arguments.against)
        name = arguments.base_name or arguments.against.name
        sections += difference_section(base, records, name)
    text = document(records, command=arguments.pytest, sections=sections, name=arguments.name)
    output: Path | None = arguments.output
    if output is not None:
        write_file(output, text.encode(), "--output")
    return Answer(
        text.splitlines() if output is None else (),
        lambda: {"output": None if output is None else str(output), "markdown": text},
    )


ARGUMENTS = (
    argument(
        "--against",
        group="markdown",
        metavar="BASE",
        type=Path,
        help="JSON report of what it is changed from",
    ),
    argument(
        "--base-name",
        group="markdown",
        metavar="NAME",
        default="",
        help="what to call BASE, like main",
    ),
    argument(
        "--name",
        group="markdown",
        default="",
        help="of the job: tells the comments of several jobs apart",
    ),
    argument(
        "--command",
        group="markdown",
        dest="pytest",
        metavar="COMMAND",
        default="pytest",
        help="how pytest is started, for the commands that are suggested (default: pytest)",
    ),
)
