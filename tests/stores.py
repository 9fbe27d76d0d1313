"""A store of baselines that tests fill with what they need."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.baseline.store import BaselineStore as Store
from pytest_gpumem.values.environment import Environment


class BaselineStore(Store):
    """A store whose modules can be written as a whole."""

    def write(
        self, environment: Environment, module: str, tests: Mapping[str, BaselineEntry]
    ) -> Path | None:
        """Make ``tests`` the entries of a module; return the file, ``None`` if nothing changed."""

        def replace_all(entries: MutableMapping[str, BaselineEntry]) -> None:
            for test_id in entries.keys() - tests.keys():
                del entries[test_id]
            entries.update(tests)

        return self.edit(environment, module, replace_all)
