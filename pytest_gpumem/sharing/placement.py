"""Which device each worker of a host gets for its own.

All workers of all runs of a user meet in one table, as they do in the ledger: whoever comes takes
the least loaded device, in one transaction, and what a process has is void when it is gone.
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
    """As the ledger calls it."""
    total: int
    taken: Mapping[int, int] = field(default_factory=dict)
    """By process, as the driver tells."""
    seats: int | None = None
    """Workers for which it is meant, one for a MIG instance; ``None`` for as many as come."""
    strict: bool = False
    """Whether no more can use it: in exclusive-process mode."""

    def room(self, workers: Sequence[Process]) -> float:
        """Bytes for one more worker, if it shares with those that are there.

        What these hold is theirs to share; what anybody else holds is gone.
        """
        pids = {process.pid for process in workers}
        strangers = sum(size for pid, size in self.taken.items() if pid not in pids)
        return (self.total - strangers) / (len(workers) + 1)

    def is_full(self, workers: Sequence[Process]) -> bool:
        """Whether it has as many workers as it is meant for."""
        return self.seats is not None and len(workers) >= self.seats


def least_loaded(spots: Sequence[Spot], placed: Mapping[str, Sequence[Process]]) -> int | None:
    """Return the position of the device that a worker should get, ``None`` where all are full.

    One that nobody is meant to share comes after those that have a seat left; else the one with
    the most memory for each of its workers, and of equal ones the first.
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
    """This process's door to the table in ``folder``; raises ``SharingError``."""

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
        """Who is on which device, when those that are gone have been taken out."""
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
