"""``gpumem markdown REPORT``: the comment for a pull request."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpumem.cli.command import Answer, Command, argument
from pytest_gpumem.report.difference import difference_section
from pytest_gpumem.report.json_report import read_report, write_file
from pytest_gpumem.report.markdown import document


def run(arguments: argparse.Namespace) -> Answer:
    """Write the Markdown; raises ``ValueError`` for bad input."""
    records = read_report(arguments.report)
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


COMMAND = Command(
    description="Say in Markdown what failed, what grew, by which line, and what accepts it.",
    run=run,
    arguments=(
        argument("report", metavar="REPORT", type=Path, help="JSON report of the change"),
        argument(
            "--against", metavar="BASE", type=Path, help="JSON report of what it is changed from"
        ),
        argument("--base-name", metavar="NAME", default="", help="what to call BASE, like main"),
        argument("--name", default="", help="of the job: tells the comments of several jobs apart"),
        argument(
            "--command",
            dest="pytest",
            metavar="COMMAND",
            default="pytest",
            help="how pytest is started, for the commands that are suggested (default: pytest)",
        ),
        argument("-o", "--output", metavar="FILE", type=Path, help="default: the terminal"),
    ),
    examples=("gpumem markdown gpumem.json --against main.json -o comment.md",),
)
