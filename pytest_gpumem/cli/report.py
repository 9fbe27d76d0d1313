"""``gpumem report REPORT --to FORM``: a JSON report as a page, a comment or a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_gpumem.cli import picture
from pytest_gpumem.cli.command import Answer, Argument, Command, refuse_others
from pytest_gpumem.report.json_report import read_report, read_usage, write_file
from pytest_gpumem.report.markdown import difference_section, document
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import counted


def write_page(arguments: argparse.Namespace) -> Answer:
    """Write the page; raises ``ValueError`` for bad input."""
    from pytest_gpumem.report.html.page import render
    from pytest_gpumem.report.past import past_of_reports, peaks_of

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
    past = None
    if paths := [*arguments.history, *earlier]:
        past = past_of_reports(paths, without=report)
        past.moments.append((report.stem, "", peaks_of(records)))
    page = render(records, past, read_usage(report)).encode()
    write_file(path, page, "--output")
    return Answer(
        [f"{path}: {counted(len(records), 'test')}, {format_size(len(page))}"],
        lambda: {"output": str(path), "tests": len(records), "bytes": len(page)},
    )


def write_markdown(arguments: argparse.Namespace) -> Answer:
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


HTML = (
    Argument(
        "--history PATH...",
        "an earlier report, or a folder of them, by their names; may be repeated",
        type=Path,
    ),
)
MARKDOWN = (
    Argument("--against BASE", "JSON report to compare with, as of the main branch", type=Path),
    Argument("--base-name NAME", "the name of BASE in the text, like main", default=""),
    Argument("--name NAME", "of the job: distinguishes comments of several jobs", default=""),
    Argument(
        "--command COMMAND",
        "how pytest is started, for the suggested commands (default: pytest)",
        dest="pytest",
        default="pytest",
    ),
)


FORMS = ("html", "markdown", *picture.FORMATS)
SHORT = {"htm": "html", "md": "markdown"}
"""Other suffixes of the forms."""
_GROUPS = {
    "--to html": HTML,
    "--to markdown": MARKDOWN,
    **{f"--to {form}": picture.ARGUMENTS for form in picture.FORMATS},
}


def run(arguments: argparse.Namespace) -> Answer:
    """Write the report in the form given by ``--to`` or by the suffix of the output, else a page.

    Raises ``ValueError`` for bad input.
    """
    output: Path | None = arguments.output
    form: str = arguments.to or "html"
    if arguments.to is None and output is not None:
        suffix = output.suffix.lower().removeprefix(".")
        form = SHORT.get(suffix, suffix)
    if form not in FORMS:
        raise ValueError(
            f"--output {output}: its name does not say what to write; add --to with one of "
            f"{', '.join(FORMS)}"
        )
    refuse_others(arguments, f"--to {form}", _GROUPS)
    if form in picture.FORMATS:
        return picture.draw(arguments, form)
    return write_page(arguments) if form == "html" else write_markdown(arguments)


COMMAND = Command(
    description="Turn a report of --gpumem-report json:PATH into the page that html:PATH writes, "
    "one file without network requests; into Markdown for a pull request: failures, growth by "
    "line, and the command that accepts it; or into a picture, which needs matplotlib "
    "(pip install 'pytest-gpumem[plot]').",
    run=run,
    arguments=(
        Argument(
            "reports REPORT",
            "JSON report; of several, the oldest first, the last is shown and the others "
            "are its history",
            nargs="*",
            type=Path,
        ),
        Argument(
            f"--to {'|'.join(FORMS)}",
            "the form to write (default: by the suffix of --output, else html)",
            choices=FORMS,
        ),
        Argument(
            "-o --output FILE",
            "default: beside the report, with the suffix of the form; Markdown goes to the "
            "terminal",
            type=Path,
        ),
    ),
    groups={"html": HTML, "markdown": MARKDOWN, "png, svg, pdf": picture.ARGUMENTS},
    examples=(
        "gpumem report report.json                                   writes report.html",
        "gpumem report report.json --history reports/ -o memory.html",
        "gpumem report gpumem.json --to markdown --against main.json",
        "gpumem report report.json --to png --kind timeline --test test_step",
    ),
)
