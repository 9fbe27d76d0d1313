"""A SQLite file that several processes of one host write, and the identity of a process.

A process is identified by its PID and start time, because PIDs are reused.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

FOLDER_VARIABLE = "GPUMEM_SHARE_DIR"
BUSY = 30.0
"""Seconds that a writer waits for the lock; a transaction takes milliseconds."""


UNKNOWN_PROCESS = 0
"""The key, in place of a PID, of bytes that the driver assigns to no process."""


class Process(NamedTuple):
    """A process of this host."""

    pid: int
    started: float
    """Start time in seconds, by the system: with the PID it identifies one process for ever."""


def this_process() -> Process:
    """Return the calling process."""
    return Process(os.getpid(), psutil.Process().create_time())


def is_alive(process: Process) -> bool:
    """Return whether it still runs. A zombie does not: its memory has been freed."""
    try:
        found = psutil.Process(process.pid)
        return found.create_time() == process.started and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def descends_from(pid: int, ancestors: Collection[int]) -> bool:
    """Return whether a running process was started by one of ``ancestors``, directly or not."""
    try:
        return any(parent.pid in ancestors for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def name_of(pid: int) -> str:
    """Return a process's readable name: its PID, and its program where the system gives it."""
    try:
        return f"PID {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"PID {pid}"


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
            # Without sync: after a crash of the host its entries are worthless anyway. Without a
            # write-ahead log: SQLite waits for no lock while it changes a new file to that.
            for pragma in ("synchronous = OFF", "foreign_keys = ON"):
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

    def __del__(self) -> None:
        # sqlite3 warns of a connection that nothing has closed, since Python 3.13.
        if hasattr(self, "_connection"):
            self.close()

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
