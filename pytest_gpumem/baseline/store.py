"""Baselines on disk: one JSON file per environment and test module.

``<root>/<environment.key>/<test module path>.json``, so the tests of ``tests/test_model.py`` are in
``baselines/sim-T4-torch2.13/tests/test_model.py.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from pytest_gpumem.baseline.content import (
    BaselineEntry,
    BaselineError,
    BaselineFile,
    Entries,
    file_bytes,
    parse,
    read_file,
    read_folder,
    serialize,
    unusable,
)
from pytest_gpumem.baseline.locks import PATIENCE, LockError, Locks
from pytest_gpumem.jsonfile import replace_file
from pytest_gpumem.paths import from_here
from pytest_gpumem.quoting import quoted
from pytest_gpumem.values.environment import Environment

__all__ = ["BaselineEntry", "BaselineError", "BaselineStore", "read_folder", "split_nodeid"]

Edit = Callable[[MutableMapping[str, BaselineEntry]], object]
"""A function that edits a module's entries; called again if the file has changed meanwhile."""


def split_nodeid(nodeid: str) -> tuple[str, str]:
    """Return the module's path and the test's id of a node id.

    The ``@group`` that pytest-xdist's ``--dist loadgroup`` appends is left out. As in pytest-xdist,
    it is searched after the last bracket.
    """
    module, _, test_id = nodeid.partition("::")
    if test_id.rfind("@") > test_id.rfind("]"):
        test_id = test_id[: test_id.rfind("@")]
    return module, test_id


class BaselineStore:
    """The baselines under one folder.

    Files are read once for lookups; writing reads the file again. A file that is damaged, or of
    another kind or environment, raises :class:`BaselineError` and is never overwritten.
    """

    def __init__(self, root: Path, patience: float = PATIENCE) -> None:
        self.root = root
        self._loaded: dict[Path, BaselineFile | None] = {}
        self._locks = Locks(root, patience)

    def path(self, key: str, module: str) -> Path:
        """Return the file of an environment's ``key`` and of ``module``, a path below the rootdir.

        Raises :class:`BaselineError` where the module lies outside pytest's rootdir.
        """
        parts = PurePosixPath(module).parts
        if _is_outside(module):
            name = quoted(module) if module else "the test's file"  # pytest's id leaves it out
            raise BaselineError(
                f"{name} lies outside pytest's rootdir, so its baselines have no place "
                f"under {from_here(self.root)}; set --rootdir to a folder that holds it"
            )
        return self.root.joinpath(key, *parts[:-1], f"{parts[-1]}.json")

    def load(self, environment: Environment, module: str) -> Mapping[str, BaselineEntry]:
        """Return the entries of a module by test id, empty where there is no file."""
        content = self._content(environment.key, module)
        return content.tests if content else {}

    def entry(self, environment: Environment, module: str, test_id: str) -> BaselineEntry | None:
        """Return the entry of one test, ``None`` where it has none in this environment."""
        return self.load(environment, module).get(test_id)

    def elsewhere(
        self, module: str, test_id: str, environment: Environment
    ) -> list[tuple[Environment, BaselineEntry]]:
        """Return a test's entries in other environments, by key: for display only.

        Unreadable files of other environments are ignored.
        """
        known = []
        keys: list[str] = []
        with suppress(OSError):
            folders = (path for path in self.root.iterdir() if not path.name.startswith("."))
            keys = [folder.name for folder in folders if folder.is_dir()]
        for key in sorted(set(keys) - {environment.key}):
            with suppress(BaselineError):
                content = self._content(key, module)
                if content and test_id in content.tests:
                    known.append((content.environment, content.tests[test_id]))
        return known

    def modules(self, environment: Environment) -> list[str]:
        """Return the module paths that have a file in this environment, sorted."""
        folder = self.root / environment.key
        return sorted(
            path.relative_to(folder).as_posix().removesuffix(".json")
            for path in folder.rglob("*.json")
        )

    def edit(self, environment: Environment, module: str, edit: Edit) -> Path | None:
        """Read the entries of a module, apply ``edit``, and write them.

        Returns the file, ``None`` if nothing changed. Other writers wait, also on other hosts. The
        write is atomic, even if the process is killed. A file without tests is removed, and so are
        folders that become empty.
        """
        path = self.path(environment.key, module)
        self._loaded.pop(path, None)
        content = file_bytes(path)
        if (tests := _edited(path, content, environment.key, edit)) is None:
            return None
        if path.is_symlink():
            raise BaselineError(
                f"baseline {from_here(path)} is a symbolic link and is not written through; put "
                "the file itself in its place"
            )
        try:
            with self._locks.holding() as draft:
                if (now := file_bytes(path)) != content:
                    tests = _edited(path, now, environment.key, edit)
                if tests is None:
                    return None
                if tests:
                    replace_file(path, serialize(path, environment, tests), draft)
                else:
                    self._remove(path)
                return path
        except LockError as error:
            raise BaselineError(f"baseline {from_here(path)} was not written: {error}") from error
        except OSError as error:
            raise unusable("written", path, error) from error

    def _content(self, key: str, module: str) -> BaselineFile | None:
        if _is_outside(module):
            return None  # nothing is stored for it; writing raises the error
        path = self.path(key, module)
        if path not in self._loaded:
            self._loaded[path] = read_file(path, key)
        return self._loaded[path]

    def _remove(self, path: Path) -> None:
        path.unlink()
        for folder in path.parents:
            if folder == self.root or any(folder.iterdir()):
                return
            folder.rmdir()


def _is_outside(module: str) -> bool:
    parts = PurePosixPath(module).parts
    return not parts or ".." in parts or Path(module).is_absolute()


def _edited(path: Path, content: bytes | None, key: str, edit: Edit) -> Entries | None:
    """Return the entries of a file's ``content`` after ``edit``, ``None`` if unchanged."""
    before = {} if content is None else parse(path, content, key).tests.data
    tests = Entries(before)
    edit(tests)
    return None if tests.data == before else tests
