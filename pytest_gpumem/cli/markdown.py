"""``gpumem markdown REPORT``: the comment for a pull request."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_gpumem.report.difference import difference_section
from pytest_gpumem.report.json_report import read_report, write_file
from pytest_gpumem.report.markdown import document


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "markdown",
        help="a JSON report as the comment for a pull request",
        description="Say in Markdown what failed, what grew, by which line, and what accepts it.",
        epilog="example: gpumem markdown gpumem.json --against main.json -o comment.md",
    )
    parser.add_argument("report", metavar="REPORT", type=Path, help="JSON report of the change")
    parser.add_argument(
        "--against", metavar="BASE", type=Path, help="JSON report of what it is changed from"
    )
    parser.add_argument(
        "--base-name", metavar="NAME", default="", help="what to call BASE, like main"
    )
    parser.add_argument(
        "--name", default="", help="of the job: tells the comments of several jobs apart"
    )
    parser.add_argument(
        "--command",
        dest="pytest",
        metavar="COMMAND",
        default="pytest",
        help="how pytest is started, for the commands that are suggested (default: pytest)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="default: the terminal")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the Markdown and return 0; raises ``ValueError`` for bad input."""
    records = read_report(arguments.report)
    sections: list[str] = []
    if arguments.against is not None:
        base = read_report(arguments.against)
        name = arguments.base_name or arguments.against.name
        sections += difference_section(base, records, name)
    text = document(records, command=arguments.pytest, sections=sections, name=arguments.name)
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        write_file(arguments.output, text.encode(), "--output")
    return 0
