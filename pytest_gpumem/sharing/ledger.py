"""The ledger of a host: GPU memory that a user's runs hold, wait for and have had.

A SQLite database, written by several processes, in one folder of the host. Its entries live as long
as their processes, except for a log of the last day. Entries of a killed process are void: the next
process that reads the ledger removes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_gpumem.sharing import admission
from pytest_gpumem.sharing.admission import NEEDS_NO_GPU, Budget, Need, Request
from pytest_gpumem.sharing.database import Database, Process, is_alive, this_process

FILE_NAME = "ledger.sqlite3"
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
    nodeid TEXT NOT NULL, since REAL NOT NULL, granted REAL, duration REAL,
    exclusive INTEGER NOT NULL, priority INTEGER NOT NULL, guaranteed INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS need (
    test INTEGER NOT NULL REFERENCES test ON DELETE CASCADE,
    device TEXT NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY (test, device));
CREATE TABLE IF NOT EXISTS yielding (
    test INTEGER PRIMARY KEY REFERENCES test ON DELETE CASCADE);
CREATE TABLE IF NOT EXISTS suspect (
    run TEXT NOT NULL, nodeid TEXT NOT NULL, time REAL NOT NULL, PRIMARY KEY (run, nodeid));
CREATE TABLE IF NOT EXISTS log (
    time REAL NOT NULL, event TEXT NOT NULL, run TEXT NOT NULL, worker TEXT NOT NULL,
    pid INTEGER NOT NULL, nodeid TEXT NOT NULL, device TEXT NOT NULL, bytes INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS log_time ON log (time);
"""


@dataclass(frozen=True)
class QueuedTest:
    """A test that runs or waits, in readable form."""

    nodeid: str
    run: str
    worker: str
    process: Process
    request: Request
    is_running: bool


@dataclass(frozen=True)
class Entry:
    """An entry of the log: a test was ``granted`` bytes of a device, or ``released`` them."""

    time: float
    event: str
    run: str
    worker: str
    pid: int
    nodeid: str
    device: str
    bytes: int


@dataclass(frozen=True)
class State:
    """The tests that hold memory and those that wait for it, at one moment."""

    devices: Mapping[str, Budget]
    running: tuple[QueuedTest, ...]
    waiting: tuple[QueuedTest, ...]


@dataclass(frozen=True)
class Decision:
    """The answer to a test's request."""

    granted: bool
    must_tear_down: bool
    """Whether its worker has to tear its fixtures down before it waits on."""
    state: State
    """The state from which the answer was found."""


class Ledger(Database):
    """A process's connection to the ledger in ``folder``; every call is one transaction."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(folder / FILE_NAME, _SCHEMA)
        self._clock = clock
        self._own: Process | None = None
        """This process, once it has joined; it need not be looked up."""

    def join(self, run: str, name: str, process: Process | None = None) -> int:
        """Enter a worker, which is this process unless another is given; return its number."""
        if process is None:
            process = self._own = this_process()
        with self.transaction():
            self._void_dead()
            for table in ("log", "suspect"):
                self.execute(f"DELETE FROM {table} WHERE time < ?", (self._clock() - SECONDS_KEPT,))
            return self._insert(
                "INSERT INTO worker (pid, started, run, name) VALUES (?, ?, ?, ?)",
                (*process, run, name),
            )

    def leave(self, worker: int) -> None:
        """Remove a worker, with all that it holds and waits for."""
        with self.transaction():
            self._take_out(worker)

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
        """Put a test into the queue; return the number under which it waits.

        ``needs`` are its bytes by device, above what its worker holds anyway.
        """
        exclusive = need.exclusive or need.bytes is None
        row = (need.duration, exclusive, need.priority, need.guaranteed)
        with self.transaction():
            test = self._insert(
                "INSERT INTO test (worker, nodeid, since, duration, exclusive, priority, "
                "guaranteed) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (worker, nodeid, self._clock(), *row),
            )
            self._enter_needs(test, needs)
            return test

    def ask_again(self, test: int, needs: Mapping[str, int]) -> None:
        """Change the needs of a waiting test; it keeps its place."""
        with self.transaction():
            self.execute("DELETE FROM need WHERE test = ?", (test,))
            self._enter_needs(test, needs)

    def try_grant(self, test: int, devices: Mapping[str, Budget]) -> Decision:
        """Grant ``test`` its memory if it may run now on ``devices``, which hold no workers yet."""
        with self.transaction():
            answer = self._answer(test, devices)
            # Looking up dead processes costs more than the rest, and can only make more room.
            if not answer.granted and self._void_dead():
                answer = self._answer(test, devices)
            return answer

    def _answer(self, test: int, devices: Mapping[str, Budget]) -> Decision:
        state = self._state(devices)
        now = self._clock()
        asked = next(lease for lease in state.waiting if lease.request.id == test)
        running = [lease.request for lease in state.running]
        waiting = [lease.request for lease in state.waiting]
        if asked.request in admission.admissible(waiting, running, state.devices, now):
            self.execute("UPDATE test SET granted = ? WHERE id = ?", (now, test))
            self._log("granted", asked)
            return Decision(granted=True, must_tear_down=False, state=state)
        tear_down = asked.request.owner in admission.must_tear_down(
            waiting, running, state.devices, now
        )
        self.executemany(
            "INSERT OR IGNORE INTO yielding VALUES (?)",
            [(one,) for one in admission.to_yield(waiting, running, state.devices, now)],
        )
        return Decision(granted=False, must_tear_down=tear_down, state=state)

    def has_to_yield(self, test: int) -> bool:
        """Return whether ``test``, which runs, has to make room for another."""
        return any(self.execute("SELECT 1 FROM yielding WHERE test = ?", (test,)))

    def release(self, test: int) -> None:
        """Remove a test, whether it runs or waits."""
        with self.transaction():
            for lease in self._queued():
                if lease.request.id == test:
                    self._log("released" if lease.is_running else "withdrawn", lease)
            self.execute("DELETE FROM test WHERE id = ?", (test,))

    def neighbours(self, worker: int) -> int | None:
        """Return how many other tests have used the devices of ``worker``'s running test."""
        with self.transaction():
            running = [one for one in self._queued() if one.is_running]
            own = next((one for one in running if one.request.owner == worker), None)
            if own is None:
                return None
            devices = own.request.needs.keys()
            others = {
                (one.run, one.worker, one.nodeid)
                for one in running
                if one is not own and one.request.needs.keys() & devices
            }
            ended = self.execute(
                "SELECT DISTINCT run, worker, nodeid, device FROM log "
                "WHERE time >= ? AND event IN ('released', 'void')",
                (own.request.since,),
            )
            others |= {tuple(who) for *who, device in ended if device in devices}
            return sum((run, name) != (own.run, own.worker) for run, name, _ in others)

    def state(self, devices: Mapping[str, Budget]) -> State:
        """Return the tests that hold memory and those that wait for it now."""
        with self.transaction():
            self._void_dead()
            return self._state(devices)

    def suspect(self, run: str, nodeid: str) -> None:
        """Record a test of ``run`` that was on a device when it failed, and may be the cause."""
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

    def log(self) -> list[Entry]:
        """Return the grants and releases, in order."""
        return [Entry(*row) for row in self.execute("SELECT * FROM log ORDER BY rowid")]

    def _void_dead(self) -> bool:
        """Remove the workers whose process has ended; return whether there were any."""
        owners = self.owners().items()
        dead = [worker for worker, one in owners if one != self._own and not is_alive(one)]
        for worker in dead:
            self._take_out(worker, event="void")
        return bool(dead)

    def _take_out(self, worker: int, event: str = "released") -> None:
        for lease in self._queued():
            if lease.request.owner == worker and lease.is_running:
                self._log(event, lease)
        self.execute("DELETE FROM worker WHERE id = ?", (worker,))

    def _log(self, event: str, lease: QueuedTest) -> None:
        now, who = self._clock(), (lease.run, lease.worker, lease.process.pid, lease.nodeid)
        self.executemany(
            "INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(now, event, *who, device, need) for device, need in lease.request.needs.items()],
        )

    def _insert(self, statement: str, row: tuple[object, ...]) -> int:
        """Insert a row; return its number."""
        number = self.execute(statement, row).lastrowid
        assert number is not None
        return number

    def _enter_needs(self, test: int, needs: Mapping[str, int]) -> None:
        rows = [(test, device, need) for device, need in needs.items()]
        self.executemany("INSERT INTO need VALUES (?, ?, ?)", rows)

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
        leases = list(self._queued())
        running = tuple(lease for lease in leases if lease.is_running)
        return State(known, running, tuple(lease for lease in leases if not lease.is_running))

    def _queued(self) -> Iterator[QueuedTest]:
        needs: dict[int, dict[str, int]] = {}
        for test, device, need in self.execute("SELECT test, device, bytes FROM need"):
            needs.setdefault(test, {})[device] = need
        rows = self.execute(
            "SELECT test.id, worker, nodeid, since, granted, duration, exclusive, priority, "
            "guaranteed, pid, started, run, name FROM test JOIN worker ON worker.id = test.worker "
            "ORDER BY test.id"
        ).fetchall()
        for test, worker, nodeid, since, granted, duration, *flags, pid, started, run, name in rows:
            exclusive, priority, guaranteed = flags
            asked = since if granted is None else granted
            request = Request(
                *(test, worker, needs.get(test, {}), asked, duration),
                *(bool(exclusive), priority, bool(guaranteed)),
            )
            yield QueuedTest(nodeid, run, name, Process(pid, started), request, granted is not None)
