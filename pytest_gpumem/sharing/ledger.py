"""The ledger of a host: GPU memory that a user's runs hold, wait for and have held.

A SQLite database, written by several processes, in one folder of the host. Its entries are valid as
long as their processes live, except for a log of the last day. The next process that reads the
ledger removes the entries of a killed process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pytest_gpumem.sharing import admission
from pytest_gpumem.sharing.admission import NEEDS_NO_GPU, Budget, Need, Request
from pytest_gpumem.sharing.database import Database, Process, is_alive, this_process

FILE_NAME = "ledger-2.sqlite3"
"""File name, changed with the tables: several releases may share a folder."""
SECONDS_KEPT = 86_400.0
"""Seconds for which log entries are kept."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS worker (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER NOT NULL, started REAL NOT NULL,
    run TEXT NOT NULL, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS held (
    worker INTEGER NOT NULL REFERENCES worker ON DELETE CASCADE,
    device TEXT NOT NULL, context INTEGER NOT NULL, fixtures INTEGER NOT NULL,
    PRIMARY KEY (worker, device));
CREATE TABLE IF NOT EXISTS test (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    worker INTEGER NOT NULL REFERENCES worker ON DELETE CASCADE,
    needs TEXT NOT NULL, since REAL NOT NULL, duration REAL,
    exclusive INTEGER NOT NULL, priority INTEGER NOT NULL, guaranteed INTEGER NOT NULL,
    nodeid TEXT NOT NULL,
    runs INTEGER NOT NULL DEFAULT 0, has_to_yield INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS suspect (
    run TEXT NOT NULL, nodeid TEXT NOT NULL, time REAL NOT NULL, PRIMARY KEY (run, nodeid));
CREATE TABLE IF NOT EXISTS stay (
    run TEXT NOT NULL, worker TEXT NOT NULL, nodeid TEXT NOT NULL, device TEXT NOT NULL,
    granted REAL NOT NULL, time REAL NOT NULL, bytes INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS stay_time ON stay (time);
"""


class Stay(NamedTuple):
    """One test's use of one device; seconds of the host's clock, and bytes."""

    run: str
    worker: str
    nodeid: str
    device: str
    granted: float
    released: float
    bytes: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.released - self.granted


@dataclass(frozen=True)
class State:
    """The tests that hold memory and those that wait for it, at one moment."""

    devices: Mapping[str, Budget]
    running: tuple[Request, ...]
    waiting: tuple[Request, ...]


@dataclass(frozen=True)
class Decision:
    """The decision on a test's request."""

    granted: bool
    must_tear_down: bool
    """Whether its worker has to tear its fixtures down before it continues to wait."""
    state: State
    """The state on which the decision is based."""


class Ledger(Database):
    """A process's connection to the ledger in ``folder``; every call is one transaction."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(folder / FILE_NAME, _SCHEMA)
        self._clock = clock
        self._own: Process | None = None
        """This process, after it has joined, so that it need not be looked up."""

    def join(self, run: str, name: str, process: Process | None = None) -> int:
        """Enter a worker, which is this process unless another is given; return its number."""
        if process is None:
            process = self._own = this_process()
        with self.transaction():
            self._remove_dead()
            for table in ("stay", "suspect"):
                self.execute(f"DELETE FROM {table} WHERE time < ?", (self._clock() - SECONDS_KEPT,))
            return self._insert("worker (pid, started, run, name)", *process, run, name)

    def leave(self, worker: int) -> None:
        """Remove a worker, with its memory and its waiting test."""
        with self.transaction():
            self._remove(worker)

    def hold(self, worker: int, device: str, *, context: int, fixtures: int) -> None:
        """Enter the bytes that ``worker`` holds of ``device`` between its tests."""
        with self.transaction():
            self.execute(
                "INSERT OR REPLACE INTO held VALUES (?, ?, ?, ?)",
                (worker, device, context, fixtures),
            )

    def ask(
        self, worker: int, nodeid: str, needs: Mapping[str, int], need: Need = NEEDS_NO_GPU
    ) -> int:
        """Put a test into the queue; return its number there.

        ``needs`` are its bytes by device, without those that its worker holds anyway.
        """
        exclusive = need.exclusive or need.bytes is None
        conditions = need.duration, exclusive, need.priority, need.guaranteed
        with self.transaction():
            return self._insert(
                "test (worker, needs, since, duration, exclusive, priority, guaranteed, nodeid)",
                *(worker, json.dumps(dict(needs)), self._clock(), *conditions, nodeid),
            )

    def ask_again(self, test: int, needs: Mapping[str, int]) -> None:
        """Change the needs of a waiting test; it keeps its place."""
        with self.transaction():
            self.execute("UPDATE test SET needs = ? WHERE id = ?", (json.dumps(dict(needs)), test))

    def try_grant(self, test: int, devices: Mapping[str, Budget]) -> Decision:
        """Grant ``test`` its memory if it may run now; ``devices`` are without workers' memory."""
        with self.transaction():
            decision = self._decide(test, devices)
            # Looking for dead processes is slow, and only needed if there is too little memory.
            if not decision.granted and self._remove_dead():
                decision = self._decide(test, devices)
            return decision

    def _decide(self, test: int, devices: Mapping[str, Budget]) -> Decision:
        state = self._state(devices)
        now = self._clock()
        known = state.waiting, state.running, state.devices, now
        asked = next(one for one in state.waiting if one.id == test)
        if asked in admission.admissible(*known):
            self.execute("UPDATE test SET since = ?, runs = 1 WHERE id = ?", (now, test))
            return Decision(granted=True, must_tear_down=False, state=state)
        self.executemany(
            "UPDATE test SET has_to_yield = 1 WHERE id = ?",
            [(one,) for one in admission.to_yield(*known)],
        )
        must_tear_down = asked.owner in admission.must_tear_down(*known)
        return Decision(granted=False, must_tear_down=must_tear_down, state=state)

    def has_to_yield(self, test: int) -> bool:
        """Return whether ``test``, which runs, has to make room for another."""
        return any(self.execute("SELECT 1 FROM test WHERE id = ? AND has_to_yield", (test,)))

    def release(self, test: int) -> list[Stay]:
        """Remove a test, whether it runs or waits; return its stays if it ran."""
        with self.transaction():
            stays = self._log(one for one in self._requests(runs=True) if one.id == test)
            self.execute("DELETE FROM test WHERE id = ?", (test,))
            return stays

    def neighbours(self, worker: int) -> int | None:
        """Return how many other tests have used its devices since ``worker``'s test began."""
        with self.transaction():
            running = self._requests(runs=True)
            own = next((one for one in running if one.owner == worker), None)
            if own is None:
                return None
            beside = [(one.run, one.worker, one.nodeid, at) for one in running for at in one.needs]
            beside += self.execute(
                "SELECT DISTINCT run, worker, nodeid, device FROM stay WHERE time >= ?",
                (own.since,),
            )
            others = {tuple(who) for *who, device in beside if device in own.needs}
            return sum((run, name) != (own.run, own.worker) for run, name, _ in others)

    def state(self, devices: Mapping[str, Budget]) -> State:
        """Return the tests that hold memory and those that wait for it now."""
        with self.transaction():
            self._remove_dead()
            return self._state(devices)

    def suspect(self, run: str, nodeid: str) -> None:
        """Record a test of ``run`` that was on a device when that failed: a possible cause."""
        with self.transaction():
            row = (run, nodeid, self._clock())
            self.execute("INSERT OR IGNORE INTO suspect VALUES (?, ?, ?)", row)

    def is_suspect(self, run: str, nodeid: str) -> bool:
        """Return whether :meth:`suspect` was called for the test."""
        row = (run, nodeid)
        return any(self.execute("SELECT 1 FROM suspect WHERE run = ? AND nodeid = ?", row))

    def owners(self) -> dict[int, Process]:
        """Return the processes of all workers, dead ones too, by worker number."""
        rows = self.execute("SELECT id, pid, started FROM worker")
        return {worker: Process(pid, started) for worker, pid, started in rows}

    def stays(self) -> list[Stay]:
        """Return the stays of tests that have ended, in the order of their ends."""
        return [Stay(*row) for row in self.execute("SELECT * FROM stay ORDER BY rowid")]

    def _remove_dead(self) -> bool:
        """Remove the workers whose process has ended; return whether there were any."""
        owners = self.owners().items()
        dead = [worker for worker, one in owners if one != self._own and not is_alive(one)]
        for worker in dead:
            self._remove(worker)
        return bool(dead)

    def _remove(self, worker: int) -> None:
        self._log(one for one in self._requests(runs=True) if one.owner == worker)
        self.execute("DELETE FROM worker WHERE id = ?", (worker,))

    def _log(self, ended: Iterable[Request]) -> list[Stay]:
        """Keep the stays of tests that end now."""
        now = self._clock()
        stays = [
            Stay(one.run, one.worker, one.nodeid, device, one.since, now, size)
            for one in ended
            for device, size in one.needs.items()
        ]
        self.executemany("INSERT INTO stay VALUES (?, ?, ?, ?, ?, ?, ?)", stays)
        return stays

    def _insert(self, columns: str, *row: object) -> int:
        """Insert a row; return its number."""
        places = ", ".join("?" * len(row))
        number = self.execute(f"INSERT INTO {columns} VALUES ({places})", row).lastrowid
        assert number is not None
        return number

    def _state(self, devices: Mapping[str, Budget]) -> State:
        held = list(self.execute("SELECT device, worker, context, fixtures FROM held"))
        known = {
            name: replace(
                device,
                contexts={worker: context for on, worker, context, _ in held if on == name},
                fixtures={worker: fixtures for on, worker, _, fixtures in held if on == name},
            )
            for name, device in devices.items()
        }
        return State(known, self._requests(runs=True), self._requests(runs=False))

    def _requests(self, *, runs: bool) -> tuple[Request, ...]:
        """Return the tests that run, or those that wait, in the order in which they asked."""
        rows = self.execute(
            "SELECT test.id, worker, needs, since, duration, exclusive, priority, guaranteed, "
            "nodeid, run, name, pid FROM test JOIN worker ON worker.id = test.worker "
            "WHERE runs = ? ORDER BY test.id",
            (runs,),
        )
        return tuple(
            Request(
                *(test, worker, json.loads(needs), since, duration),
                *(bool(exclusive), priority, bool(guaranteed), *who),
            )
            for test, worker, needs, since, duration, exclusive, priority, guaranteed, *who in rows
        )
