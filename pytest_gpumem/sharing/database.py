"""A file that several processes of one host write: SQLite, one transaction at a time."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER_VARIABLE = "GPUMEM_SHARE_DIR"
BUSY = 30.0
"""Seconds after which a writer that does not get its turn gives up; a transaction takes ms."""


class SharingError(Exception):
    """GPUs cannot be shared; the message is one sentence for the user."""


def default_folder() -> Path:
    """Return the folder shared by this user's runs on this host."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    user = str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    # Not in the home directory, which several hosts may share.
    return Path(tempfile.gettempdir()) / f"pytest-gpumem-{user}"


class Database:
    """A connection to the database ``path``, created from ``schema`` where it is new."""

    def __init__(self, path: Path, schema: str) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=BUSY, isolation_level=None, check_same_thread=False
            )
            # Entries lost in a crash of the host would be void afterwards anyway: hence the first
            # one.
            for pragma in ("synchronous = OFF", "journal_mode = WAL", "foreign_keys = ON"):
                self._connection.execute(f"PRAGMA {pragma}")
            self._connection.executescript(schema)
        except (OSError, sqlite3.Error) as error:
            raise SharingError(
                f"the ledger of shared GPUs {path} cannot be opened: {error}; remove it, or set "
                f"{FOLDER_VARIABLE} to a folder of this host that can be written"
            ) from error
        self.execute = self._connection.execute
        self.executemany = self._connection.executemany

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as one exclusive transaction."""
        try:
            self.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise SharingError(
                f"the ledger of shared GPUs {self.path} cannot be written: {error}"
            ) from error
        try:
            yield
        except BaseException:
            self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")
