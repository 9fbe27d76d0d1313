"""``gpumem baselines``: commands on stored baselines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_gpumem.baseline.explanation import explanation_lines
from pytest_gpumem.baseline.store import BaselineEntry, BaselineFile, read_folder, split_nodeid
from pytest_gpumem.cli import moved, pruned
from pytest_gpumem.cli.columns import table, terminal_width
from pytest_gpumem.cli.command import Answer, Argument, Command, Commands, argument
from pytest_gpumem.echo import quoted
from pytest_gpumem.sizes import format_exact, format_size

FOLDER: Argument = argument(
    "--baselines",
    metavar="DIR",
    type=Path,
    default=Path("baselines"),
    help="folder of the stored baselines (default: baselines)",
)
HEADER = ("environment", "module", "tests", "largest peak")


def list_all(arguments: argparse.Namespace) -> Answer:
    """Return each file: its environment, its module, and how much its tests take."""
    files = read_folder(arguments.baselines)
    return Answer(
        _table(files),
        lambda: [
            {
                "environment": content.environment.key,
                "module": module,
                "tests": {name: entry.peak_allocated for name, entry in content.tests.items()},
            }
            for module, content in files
        ],
    )


def _table(files: list[tuple[str, BaselineFile]]) -> Iterator[str]:
    rows = [
        (
            content.environment.key,
            module,
            str(len(content.tests)),
            format_size(max(entry.peak_allocated for entry in content.tests.values())),
        )
        for module, content in files
        if content.tests
    ]
    yield from table([HEADER, *rows], left=(0, 1), given_up=(3,), width=terminal_width())


def show(arguments: argparse.Namespace) -> Answer:
    """Return the entries of a test, or of all tests of a module, in every environment."""
    module, test_id = split_nodeid(arguments.test)
    found = [
        (content, name, entry)
        for path, content in read_folder(arguments.baselines)
        if path == module
        for name, entry in content.tests.items()
        if test_id in ("", name, name.partition("[")[0])
    ]
    if not found:
        raise ValueError(f"{arguments.baselines} holds nothing of {quoted(arguments.test)}")
    return Answer(
        [line for content, name, entry in found for line in _entry(content, module, name, entry)],
        lambda: [_data(content, module, name, entry) for content, name, entry in found],
    )


def _entry(content: BaselineFile, module: str, name: str, entry: BaselineEntry) -> Iterator[str]:
    yield f"{module}::{name} [{content.environment.key}]"
    tolerance = "" if entry.tolerance is None else f", tolerance {entry.tolerance}"
    yield (
        f"  peak {format_exact(entry.peak_allocated)}, "
        f"reserved {format_size(entry.peak_reserved)}{tolerance}"
    )
    for phase, peak in entry.phases.items():
        yield f"  {phase} peak {format_exact(peak)}"
    if entry.peak is not None:
        sites = [site.to_dict() for site in entry.peak.sites]
        yield from explanation_lines(sites, signed=False, width=terminal_width())


def _data(content: BaselineFile, module: str, name: str, entry: BaselineEntry) -> dict[str, Any]:
    return {
        "nodeid": f"{module}::{name}",
        "environment": content.environment.to_dict(),
        **entry.to_dict(),
    }


COMMAND = Commands(
    description="Look at the stored baselines, let them follow a test that was renamed, and drop "
    "those of tests that are gone. pytest --gpumem-update-baselines records them.",
    parts={
        "list": (
            "each file of baselines, with its tests",
            Command(
                description="List the stored baselines: environment, test module, number of "
                "tests, and the largest peak among them.",
                run=list_all,
                arguments=(FOLDER,),
                examples=("gpumem baselines list",),
            ),
        ),
        "show": (
            "what is stored of a test",
            Command(
                description="Show what is stored of a test, or of all tests of a module, in every "
                "environment: peak, phases, and the tensors at the peak.",
                run=show,
                arguments=(
                    argument("test", metavar="TEST", help="node id, or path of a test module"),
                    FOLDER,
                ),
                examples=('gpumem baselines show "tests/test_model.py::test_step"',),
            ),
        ),
        "move": (
            "let what is stored follow a test that was moved or renamed",
            Command(
                description="Give what is stored of the test OLD to the test NEW, in every "
                "environment. OLD and NEW are node ids, or both paths of test modules, relative "
                "to pytest's rootdir.",
                run=moved.move,
                arguments=(
                    argument("old", metavar="OLD", help="the test or module as it was called"),
                    argument("new", metavar="NEW", help="as it is called now"),
                    FOLDER,
                ),
                examples=(
                    'gpumem baselines move "tests/test_a.py::test_old" "tests/test_b.py::test_new"',
                ),
            ),
        ),
        "prune": (
            "drop what is stored of tests that no longer exist",
            Command(
                description="Let pytest collect the project's tests, and drop the baselines, in "
                "every environment, of modules and test functions that are gone. Of a function "
                "that is there, no parameter is dropped, as another environment may have others: "
                "pytest --gpumem-prune-baselines does that for the environment that it runs in.",
                run=pruned.prune,
                arguments=(
                    argument(
                        "--dry-run", action="store_true", help="say what would go; change nothing"
                    ),
                    FOLDER,
                ),
                examples=("gpumem baselines prune --dry-run",),
            ),
        ),
    },
    examples=(
        "gpumem baselines list",
        'gpumem baselines move "tests/test_a.py::test_old" "tests/test_b.py::test_new"',
    ),
)
