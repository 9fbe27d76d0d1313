"""The memory of a simulated GPU that several processes of a host share.

A table replaces the real driver's account of the bytes that each process holds, one for all
simulated devices of one name. As on a real device, a process's memory is free once it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from pytest_gpumem.sharing.database import Database
from pytest_gpumem.sharing.processes import Process, is_alive, this_process

FILE_NAME = "simulated.sqlite3"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS device (name TEXT PRIMARY KEY, capacity INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS taken (
    device TEXT NOT NULL, pid INTEGER NOT NULL, started REAL NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (device, pid, started)) WITHOUT ROWID;
"""


class SharedSimulatedDevice(Database):
    """A process's account with the simulated device ``name``, which has ``capacity`` bytes."""

    def __init__(self, folder: Path, name: str, capacity: int) -> None:
        super().__init__(folder / FILE_NAME, _SCHEMA)
        self.name = name
        self.capacity = capacity
        self._process = this_process()
        with self.transaction():
            self.execute("INSERT OR REPLACE INTO device VALUES (?, ?)", (name, capacity))

    def take(self, size: int) -> bool:
        """Take ``size`` bytes; return False and take nothing if the device has no room for them."""
        with self.transaction():
            if sum(self._living().values()) + size > self.capacity:
                return False
            self._add(size)
            return True

    def give(self, size: int) -> None:
        """Give ``size`` bytes back."""
        with self.transaction():
            self._add(-size)

    def give_all(self) -> None:
        """Give back everything that this process has taken."""
        with self.transaction():
            self._forget(self._process)

    def others(self) -> Mapping[int, int]:
        """Return the bytes that each other process has taken, by PID."""
        return {pid: taken for pid, taken in self.taken().items() if pid != self._process.pid}

    def taken(self) -> Mapping[int, int]:
        """Return the bytes that each process has taken, by PID."""
        with self.transaction():
            return {process.pid: taken for process, taken in self._living().items() if taken}

    def _living(self) -> dict[Process, int]:
        rows = self.execute("SELECT pid, started, bytes FROM taken WHERE device = ?", (self.name,))
        found = {Process(pid, started): taken for pid, started, taken in rows.fetchall()}
        for process in list(found):
            if process != self._process and not is_alive(process):
                self._forget(process)
                del found[process]
        return found

    def _add(self, size: int) -> None:
        self.execute(
            "INSERT INTO taken VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes",
            (self.name, *self._process, size),
        )

    def _forget(self, process: Process) -> None:
        self.execute(
            "DELETE FROM taken WHERE device = ? AND pid = ? AND started = ?",
            (self.name, *process),
        )


def simulated_devices(folder: Path) -> list[SharedSimulatedDevice]:
    """Return the simulated devices shared by processes that use ``folder``."""
    if not (folder / FILE_NAME).exists():
        return []
    with closing(Database(folder / FILE_NAME, _SCHEMA)) as database:
        found = database.execute("SELECT name, capacity FROM device ORDER BY name").fetchall()
    return [SharedSimulatedDevice(folder, name, capacity) for name, capacity in found]
