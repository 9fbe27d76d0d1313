"""The assignment of devices to the workers of a host.

All workers of all runs of a user share one table, like the ledger: each takes the least loaded
device, in one transaction, and the entries of a process are void once it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpumem.sharing.database import Database
from pytest_gpumem.sharing.processes import Process, is_alive, this_process

FILE_NAME = "places.sqlite3"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS place (
    pid INTEGER NOT NULL, started REAL NOT NULL, run TEXT NOT NULL, device TEXT NOT NULL,
    PRIMARY KEY (pid, started, device)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Spot:
    """A device that a worker may get; bytes."""

    name: str
    """The device's name in the ledger."""
    total: int
    taken: Mapping[int, int] = field(default_factory=dict)
    """Bytes by process, as the driver reports them."""
    seats: int | None = None
    """The number of workers it is meant for, one for a MIG instance; ``None`` for any number."""
    strict: bool = False
    """Whether further workers cannot use it: in exclusive-process mode."""

    def room(self, workers: Sequence[Process]) -> float:
        """Return the bytes for one more worker, if it shares with ``workers``.

        Memory of ``workers`` counts as shared; memory of other processes as unavailable.
        """
        pids = {process.pid for process in workers}
        strangers = sum(size for pid, size in self.taken.items() if pid not in pids)
        return (self.total - strangers) / (len(workers) + 1)

    def is_full(self, workers: Sequence[Process]) -> bool:
        """Return whether it has as many workers as it is meant for."""
        return self.seats is not None and len(workers) >= self.seats


def least_loaded(spots: Sequence[Spot], placed: Mapping[str, Sequence[Process]]) -> int | None:
    """Return the position of the device that a worker should get, ``None`` where all are full.

    Devices whose seats are all taken come last; else the one with the most memory for each of its
    workers, and of equal ones the first.
    """

    def worth(position: int) -> tuple[bool, float, int]:
        spot = spots[position]
        there = placed.get(spot.name, ())
        return not spot.is_full(there), spot.room(there), -position

    open_ = [
        position
        for position, spot in enumerate(spots)
        if not (spot.strict and spot.is_full(placed.get(spot.name, ())))
    ]
    return max(open_, key=worth, default=None)


class Places:
    """A process's connection to the table in ``folder``; raises ``SharingError``."""

    def __init__(self, folder: Path) -> None:
        self._database = Database(folder / FILE_NAME, _SCHEMA)

    def take(self, spots: Sequence[Spot], run: str = "", process: Process | None = None) -> int:
        """Return the position of the device that this process gets, the same at every call.

        Where no device takes another process, it is the first.
        """
        process = process or this_process()
        with self._database.transaction():
            placed = self._placed()
            for position, spot in enumerate(spots):
                if process in placed.get(spot.name, ()):
                    return position
            position = least_loaded(spots, placed) or 0
            self._database.execute(
                "INSERT INTO place VALUES (?, ?, ?, ?)", (*process, run, spots[position].name)
            )
            return position

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _placed(self) -> dict[str, list[Process]]:
        """Return the processes on each device, after removing those that have ended."""
        placed: dict[str, list[Process]] = {}
        for pid, started, device in self._database.execute(
            "SELECT pid, started, device FROM place"
        ).fetchall():
            if is_alive(process := Process(pid, started)):
                placed.setdefault(device, []).append(process)
            else:
                self._database.execute(
                    "DELETE FROM place WHERE pid = ? AND started = ?", (pid, started)
                )
        return placed


def take_place(folder: Path, spots: Sequence[Spot], run: str = "") -> int:
    """Return the position of this process's own device among ``spots``."""
    if len(spots) < 2:
        return 0
    places = Places(folder)
    try:
        return places.take(spots, run)
    finally:
        places.close()
