"""The assignment of devices to the workers of a host.

All workers of all runs of a user share one table, like the ledger: each takes the least loaded
device, in one transaction, and the entries of a process are void once it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpumem.sharing.database import Database
from pytest_gpumem.sharing.processes import Process, is_alive, this_process

FILE_NAME = "placed.sqlite3"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS place (
    pid INTEGER NOT NULL, started REAL NOT NULL, device TEXT NOT NULL,
    PRIMARY KEY (pid, started, device)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class CandidateDevice:
    """A device that a worker may get; bytes."""

    name: str
    """The device's name in the ledger."""
    total: int
    taken: Mapping[int, int] = field(default_factory=dict)
    """Bytes by process, as the driver reports them."""
    most_workers: int | None = None
    """The number of workers it is meant for, one for a MIG instance; ``None`` for any number."""
    strict: bool = False
    """Whether further workers cannot use it: in exclusive-process mode."""

    def room(self, workers: Sequence[Process]) -> float:
        """Return the bytes for one more worker, that shares what others leave with ``workers``."""
        pids = {process.pid for process in workers}
        foreign = sum(size for pid, size in self.taken.items() if pid not in pids)
        return (self.total - foreign) / (len(workers) + 1)

    def is_full(self, workers: Sequence[Process]) -> bool:
        """Return whether it has as many workers as it is meant for."""
        return self.most_workers is not None and len(workers) >= self.most_workers


def least_loaded(
    candidates: Sequence[CandidateDevice], placed: Mapping[str, Sequence[Process]]
) -> int | None:
    """Return the position of the device that a worker should get, ``None`` where all are full.

    Devices with all the workers that they are meant for come last; else the one with the most
    memory for each of its workers, and of equal ones the first.
    """
    found = []
    for position, candidate in enumerate(candidates):
        workers = placed.get(candidate.name, ())
        is_full = candidate.is_full(workers)
        if not (candidate.strict and is_full):
            found.append((not is_full, candidate.room(workers), -position))
    return -max(found)[-1] if found else None


def take_place(
    folder: Path, candidates: Sequence[CandidateDevice], process: Process | None = None
) -> int:
    """Return the position of the device that this process gets, the same at every call.

    Where no device takes another process, it is the first. Raises ``SharingError`` where the table
    in ``folder`` cannot be used.
    """
    if len(candidates) < 2:
        return 0
    process = process or this_process()
    with closing(Database(folder / FILE_NAME, _SCHEMA)) as database, database.transaction():
        placed = _placed(database)
        for position, candidate in enumerate(candidates):
            if process in placed.get(candidate.name, ()):
                return position
        position = least_loaded(candidates, placed) or 0
        row = (*process, candidates[position].name)
        database.execute("INSERT INTO place VALUES (?, ?, ?)", row)
        return position


def _placed(database: Database) -> dict[str, list[Process]]:
    """Return the processes on each device, after removing those that have ended."""
    placed: dict[str, list[Process]] = {}
    for pid, started, device in database.execute("SELECT * FROM place").fetchall():
        if is_alive(process := Process(pid, started)):
            placed.setdefault(device, []).append(process)
        else:
            database.execute("DELETE FROM place WHERE pid = ? AND started = ?", process)
    return placed
