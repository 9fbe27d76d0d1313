"""``gpumem baselines``: commands on stored baselines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.baseline.collected import Collected, GoneTests, function_of
from pytest_gpumem.baseline.explanation import explanation_lines
from pytest_gpumem.baseline.store import (
    BaselineEntry,
    BaselineFile,
    BaselineStore,
    read_folder,
    split_nodeid,
)
from pytest_gpumem.cli.columns import table, terminal_width
from pytest_gpumem.cli.command import Answer, Argument, Command, Commands, argument
from pytest_gpumem.echo import printable, quoted
from pytest_gpumem.sizes import format_exact, format_size

if TYPE_CHECKING:
    import pytest

    from pytest_gpumem.values.environment import Environment


def prune(arguments: argparse.Namespace) -> Answer:
    """Remove them; raises ``ValueError`` where pytest cannot collect the project's tests."""
    folder: Path = arguments.baselines
    files = read_folder(folder)
    gone = GoneTests(_collected(), frozenset())
    store = BaselineStore(folder)
    dropped, kept = [], 0
    for module, content in files:
        unseen, doubts = gone.among(module, content.tests)
        functions = {function_of(name) for name in gone.collected.ids.get(module, ())}
        lost = [name for name in unseen if function_of(name) not in functions]
        kept += sum(doubts.values())
        if lost and not arguments.dry_run:
            store.edit(content.environment, module, partial(_drop, lost))
        dropped += [(content.environment.key, f"{module}::{name}") for name in lost]
    verb = "would be dropped" if arguments.dry_run else "dropped"
    summary = f"{len(dropped)} stored test{'s' * (len(dropped) != 1)} {verb}"
    if kept:
        summary += (
            f"; {kept} kept that pytest did not collect, though their functions or modules are "
            "there"
        )
    return Answer(
        [*(f"{key}: {nodeid}" for key, nodeid in dropped), summary],
        lambda: {
            "dropped": [{"environment": key, "nodeid": nodeid} for key, nodeid in dropped],
            "kept_in_doubt": kept,
        },
    )


def _drop(names: list[str], entries: MutableMapping[str, BaselineEntry]) -> None:
    for name in names:
        entries.pop(name, None)


class _Collector:
    """A plugin that keeps the ids of all tests of a project, deselected ones included."""

    def __init__(self) -> None:
        self.nodeids: list[str] = []
        self.failed: list[str] = []
        self.rootpath = Path()

    def pytest_configure(self, config: pytest.Config) -> None:
        """Keep the folder to which module paths are relative."""
        self.rootpath = config.rootpath

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Keep the test's id."""
        self.nodeids.append(item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the modules that could not be collected."""
        if report.failed:
            self.failed.append(report.nodeid)


def _collected() -> Collected:
    import pytest

    found, said = _Collector(), StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[found])
    if found.failed:
        raise ValueError(f"pytest cannot collect {printable(found.failed[0])}: nothing was dropped")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        last = [line for line in said.getvalue().splitlines() if line.strip()][-1:]
        raise ValueError(f"pytest collected no tests: {printable(''.join(last))}")
    return Collected.of(found.rootpath, found.nodeids)


def move(arguments: argparse.Namespace) -> Answer:
    """Move the entries; raises a ``ValueError`` with a sentence where there is nothing to move."""
    old, new = split_nodeid(arguments.old), split_nodeid(arguments.new)
    if bool(old[1]) != bool(new[1]):
        raise ValueError(
            f"{printable(arguments.old)} and {printable(arguments.new)}: give two tests, or the "
            "paths of two modules"
        )
    folder: Path = arguments.baselines
    if old == new:
        raise ValueError(f"{printable(arguments.old)} is moved to itself; give another name")
    store = BaselineStore(folder)
    moves = [
        found
        for module, content in read_folder(folder)
        if module == old[0] and (found := _Move.of(store, content.environment, old, new)).names
    ]
    if not moves:
        raise ValueError(f"{folder} holds nothing of {printable(arguments.old)}; check the name")
    for found in moves:
        found.carry_out(store)
    moved = [one for found in moves for one in found.to_dicts()]
    return Answer(
        [f"{one['environment']}: {one['old']} -> {one['new']}" for one in moved],
        lambda: {"moved": moved},
    )


@dataclass(frozen=True)
class _Move:
    """The entries to move in one environment."""

    environment: Environment
    old: str
    new: str
    names: Mapping[str, str]
    """New test ids by old ones."""
    entries: Mapping[str, BaselineEntry]
    """Entries by new test id."""

    @classmethod
    def of(
        cls,
        store: BaselineStore,
        environment: Environment,
        old: tuple[str, str],
        new: tuple[str, str],
    ) -> _Move:
        """Return the entries to move; raises a ``ValueError`` where the new names are taken."""
        stored = store.read(environment, old[0])
        names = {name: new[1] or name for name in stored if not old[1] or name == old[1]}
        taken = store.read(environment, new[0]).keys() & set(names.values())
        if taken:
            raise ValueError(
                f"{environment.key} has a baseline of {printable(f'{new[0]}::{min(taken)}')} "
                "already; nothing was moved"
            )
        entries = {name: stored[test_id] for test_id, name in names.items()}
        return cls(environment, old[0], new[0], names, entries)

    def carry_out(self, store: BaselineStore) -> None:
        """Write the moved entries."""
        # The entries exist twice for a moment, so that none is lost if this process ends between
        # the two.
        store.edit(self.environment, self.new, lambda entries: entries.update(self.entries))
        store.edit(self.environment, self.old, self._drop)

    def to_dicts(self) -> list[dict[str, str]]:
        """Return the moves, test by test."""
        return [
            {
                "environment": self.environment.key,
                "old": f"{self.old}::{old}",
                "new": f"{self.new}::{new}",
            }
            for old, new in self.names.items()
        ]

    def _drop(self, entries: MutableMapping[str, BaselineEntry]) -> None:
        for test_id in self.names:
            del entries[test_id]


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
                run=move,
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
                run=prune,
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
