"""``gpumem baselines move OLD NEW``: baselines are moved for a moved or renamed test."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.baseline.store import BaselineEntry, BaselineStore, read_folder, split_nodeid
from pytest_gpumem.cli.command import Answer
from pytest_gpumem.echo import printable

if TYPE_CHECKING:
    from pytest_gpumem.values.environment import Environment


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
