"""``gpumem baselines prune``: removes baselines of tests that no longer exist."""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.baseline.collected import Collected, Gone
from pytest_gpumem.baseline.store import BaselineEntry, BaselineStore, read_folder
from pytest_gpumem.cli.command import Answer
from pytest_gpumem.echo import printable

if TYPE_CHECKING:
    import pytest


def prune(arguments: argparse.Namespace) -> Answer:
    """Remove them; raises ``ValueError`` where pytest cannot collect the project's tests."""
    folder: Path = arguments.baselines
    files = read_folder(folder)
    gone = Gone(_collected(), frozenset())
    store = BaselineStore(folder)
    dropped, kept = [], 0
    for module, content in files:
        unseen, doubts = gone.of(module, content.tests)
        functions = {_function(name) for name in gone.collected.ids.get(module, ())}
        lost = [name for name in unseen if _function(name) not in functions]
        kept += sum(doubts.values())
        if lost and not arguments.dry_run:
            store.edit(content.environment, module, partial(_drop, lost))
        dropped += [(content.environment.key, f"{module}::{name}") for name in lost]
    return Answer(
        [*(f"{key}: {nodeid}" for key, nodeid in dropped), _summary(len(dropped), kept, arguments)],
        lambda: {
            "dropped": [{"environment": key, "nodeid": nodeid} for key, nodeid in dropped],
            "kept_in_doubt": kept,
        },
    )


def _summary(dropped: int, kept: int, arguments: argparse.Namespace) -> str:
    verb = "would be dropped" if arguments.dry_run else "dropped"
    doubt = (
        f"; {kept} kept that pytest did not collect, though their functions or modules are there"
    )
    return f"{dropped} stored test{'s' * (dropped != 1)} {verb}{doubt if kept else ''}"


def _drop(names: list[str], entries: MutableMapping[str, BaselineEntry]) -> None:
    for name in names:
        entries.pop(name, None)


def _function(test_id: str) -> str:
    return test_id.partition("[")[0]


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
