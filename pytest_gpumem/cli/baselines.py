"""``gpumem baselines``: commands on stored baselines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.baseline.collected import Collected, function_of
from pytest_gpumem.baseline.store import BaselineEntry, BaselineStore, read_folder, split_nodeid
from pytest_gpumem.cli.command import Answer, Argument, Command, Commands, table, terminal_width
from pytest_gpumem.quoting import printable, quoted
from pytest_gpumem.sizes import format_exact, format_size
from pytest_gpumem.text import counted
from pytest_gpumem.values.environment import Environment

if TYPE_CHECKING:
    import pytest


def prune(arguments: argparse.Namespace) -> Answer:
    """Drop baselines without tests; raises ``ValueError`` if pytest cannot collect the tests."""
    import pytest

    folder: Path = arguments.baselines
    files = read_folder(folder)
    found, output = _Collector(), StringIO()
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as ``python -m pytest`` does
    with redirect_stdout(output), redirect_stderr(output):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[found])
    if found.failed:
        module, error = found.failed[0]
        raise ValueError(f"pytest cannot collect {module}, so nothing was dropped: {error}")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        last = [line for line in output.getvalue().splitlines() if line.strip()][-1:]
        raise ValueError(f"pytest collected no tests: {printable(''.join(last))}")
    collected = Collected(found.rootpath, found.nodeids)
    store = BaselineStore(folder)
    dropped, kept = [], 0
    for module, content in files:
        unseen, doubts = collected.gone(module, content.tests)
        functions = {function_of(name) for name in collected.ids.get(module, ())}
        lost = [name for name in unseen if function_of(name) not in functions]
        kept += sum(doubts.values())
        if lost and not arguments.dry_run:
            store.edit(content.environment, module, partial(_drop, lost))
        key = content.environment.key
        dropped += [{"environment": key, "nodeid": f"{module}::{name}"} for name in lost]
    verb = "would be dropped" if arguments.dry_run else "dropped"
    summary = f"{counted(len(dropped), 'stored test')} {verb}"
    if kept:
        hidden = "that pytest did not collect, though their functions or modules are there"
        summary += f"; {kept} kept {hidden}"
    return Answer(
        [*(f"{one['environment']}: {one['nodeid']}" for one in dropped), summary],
        lambda: {"dropped": dropped, "kept_in_doubt": kept},
    )


def _drop(names: Iterable[str], entries: MutableMapping[str, BaselineEntry]) -> None:
    for name in names:
        entries.pop(name, None)


class _Collector:
    """A plugin that records the ids of all tests of a project, including deselected ones."""

    def __init__(self) -> None:
        self.nodeids: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.rootpath = Path()

    def pytest_configure(self, config: pytest.Config) -> None:
        """Record the folder to which module paths are relative."""
        self.rootpath = config.rootpath

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.nodeids.append(item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record the modules that could not be collected, with the last line of their error."""
        if report.failed:
            last = str(report.longrepr).strip().splitlines()[-1].removeprefix("E ").strip()
            self.failed.append((printable(report.nodeid), printable(last)))


def move(arguments: argparse.Namespace) -> Answer:
    """Move the entries; raises a ``ValueError`` with a sentence where there is nothing to move."""
    (old, old_id), (new, new_id) = split_nodeid(arguments.old), split_nodeid(arguments.new)
    shown = printable(arguments.old)
    if bool(old_id) != bool(new_id):
        raise ValueError(
            f"{shown} and {printable(arguments.new)}: give two tests, or the paths of two modules"
        )
    if (old, old_id) == (new, new_id):
        raise ValueError(f"{shown} is moved to itself; give another name")
    store = BaselineStore(arguments.baselines)
    moves = []
    for module, content in read_folder(arguments.baselines):
        environment = content.environment
        stored = store.load(environment, old) if module == old else {}
        names = {name: new_id or name for name in stored if old_id in ("", name)}
        taken = store.load(environment, new).keys() & set(names.values()) if names else ()
        if taken:
            raise ValueError(
                f"{environment.key} has a baseline of {printable(f'{new}::{min(taken)}')} already; "
                "nothing was moved"
            )
        if names:
            moves.append((environment, names, {names[name]: stored[name] for name in names}))
    if not moves:
        raise ValueError(f"{arguments.baselines} holds nothing of {shown}; check the name")
    for environment, names, entries in moves:
        # Write the new entries before removing the old ones, so that none is lost if this process
        # is killed.
        store.edit(environment, new, methodcaller("update", entries))
        store.edit(environment, old, partial(_drop, names))
    moved = [
        {"environment": environment.key, "old": f"{old}::{before}", "new": f"{new}::{now}"}
        for environment, names, _ in moves
        for before, now in names.items()
    ]
    return Answer(
        [f"{one['environment']}: {one['old']} -> {one['new']}" for one in moved],
        lambda: {"moved": moved},
    )


FOLDER = Argument(
    "--baselines DIR",
    "folder of the stored baselines (default: baselines)",
    type=Path,
    default=Path("baselines"),
)
HEADER = ("environment", "module", "tests", "largest peak")


def list_all(arguments: argparse.Namespace) -> Answer:
    """Return for each file its environment, its module, and the largest peak of its tests."""
    rows, data = [HEADER], []
    for module, content in read_folder(arguments.baselines):
        key = content.environment.key
        peaks = {name: entry.peak_allocated for name, entry in content.tests.items()}
        data.append({"environment": key, "module": module, "tests": peaks})
        if peaks:
            rows.append((key, module, str(len(peaks)), format_size(max(peaks.values()))))
    found = table(rows, left=(0, 1), given_up=(3,), width=terminal_width())
    return Answer(found, lambda: data)


def show(arguments: argparse.Namespace) -> Answer:
    """Return the entries of a test, or of all tests of a module, in every environment."""
    module, test_id = split_nodeid(arguments.test)
    found = [
        (f"{module}::{name}", content.environment, entry)
        for path, content in read_folder(arguments.baselines)
        if path == module
        for name, entry in content.tests.items()
        if test_id in ("", name, function_of(name))
    ]
    if not found:
        raise ValueError(f"{arguments.baselines} holds nothing of {quoted(arguments.test)}")
    return Answer(
        [line for nodeid, where, entry in found for line in _entry(nodeid, where, entry)],
        lambda: [
            {"nodeid": nodeid, "environment": where.to_dict(), **entry.to_dict()}
            for nodeid, where, entry in found
        ],
    )


def _entry(nodeid: str, environment: Environment, entry: BaselineEntry) -> Iterator[str]:
    yield f"{nodeid} [{environment.key}]"
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


MOVE = 'gpumem baselines move "tests/test_a.py::test_old" "tests/test_b.py::test_new"'

COMMAND = Commands(
    description="Show the stored baselines, move those of renamed tests, and drop those of tests "
    "that no longer exist. pytest --gpumem-update-baselines records them.",
    parts={
        "list": Command(
            purpose="each file of baselines, with its tests",
            description="List the stored baselines: environment, test module, number of tests, and "
            "the largest peak among them.",
            run=list_all,
            arguments=(FOLDER,),
            examples=("gpumem baselines list",),
        ),
        "show": Command(
            purpose="the stored numbers of a test",
            description="Show the baselines of a test, or of all tests of a module, in every "
            "environment: peak, phases, and the tensors at the peak.",
            run=show,
            arguments=(Argument("test TEST", "node id, or path of a test module"), FOLDER),
            examples=('gpumem baselines show "tests/test_model.py::test_step"',),
        ),
        "move": Command(
            purpose="move the baselines of a test that was moved or renamed",
            description="Move the baselines of the test OLD to the test NEW, in every "
            "environment. OLD and NEW are node ids, or both paths of test modules, relative to "
            "pytest's rootdir.",
            run=move,
            arguments=(
                Argument("old OLD", "the former name of the test or module"),
                Argument("new NEW", "its current name"),
                FOLDER,
            ),
            examples=(MOVE,),
        ),
        "prune": Command(
            purpose="drop the baselines of tests that no longer exist",
            description="Collect the project's tests by pytest, and drop the baselines, in every "
            "environment, of modules and test functions that no longer exist. Parameters of an "
            "existing function are not dropped, as another environment may have others: pytest "
            "--gpumem-prune-baselines does that for the environment that it runs in.",
            run=prune,
            arguments=(Argument("--dry-run", "list the baselines without dropping them"), FOLDER),
            examples=("gpumem baselines prune --dry-run",),
        ),
    },
    examples=("gpumem baselines list", MOVE),
)
