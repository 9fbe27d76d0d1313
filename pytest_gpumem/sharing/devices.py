"""The devices that the processes of a host share, real and simulated, and each worker's device.

NVML reports the bytes that each process holds of a real device, without a CUDA context. For
simulated devices a table contains them, by device name and process; as on a real device, a
process's memory is free after its end.

All workers of all runs of a user also share a table of the devices that workers use: each chooses
the least loaded device, in one transaction. The entries of ended processes are removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from pytest_gpumem.measurement.nvml import NvmlAbsent, RepeatedReading, read_device, stay_open
from pytest_gpumem.sharing.database import (
    UNKNOWN_PROCESS,
    Database,
    Process,
    SharingError,
    is_alive,
    this_process,
)

CONTEXT = 600 * 2**20
"""Bytes of a CUDA context that has not been measured: 300 to 600 MB are usual."""

LEFT_FREE = 0.02
"""Share of a device that is left free for undeclared memory: library handles and kernels."""

SIMULATED_FILE, PLACE_FILE = "simulated.sqlite3", "placed.sqlite3"

_SIMULATED_SCHEMA = """
CREATE TABLE IF NOT EXISTS device (name TEXT PRIMARY KEY, capacity INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS taken (
    device TEXT NOT NULL, pid INTEGER NOT NULL, started REAL NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (device, pid, started)) WITHOUT ROWID;
"""
_PLACE_SCHEMA = """
CREATE TABLE IF NOT EXISTS place (
    pid INTEGER NOT NULL, started REAL NOT NULL, device TEXT NOT NULL,
    PRIMARY KEY (pid, started, device)) WITHOUT ROWID;
"""


class HostDevice(Protocol):
    """A device with the memory that all processes of the host hold."""

    name: str
    """The device's name in the ledger: the same in every process of the host."""
    capacity: int
    """The bytes that all tests together may use."""

    def taken(self) -> Mapping[int, int]:
        """Return the bytes that each process holds, by PID."""


class NvmlDevice:
    """A GPU or MIG instance, CUDA's ``index``, as NVML reads it; ``name`` is its UUID.

    ``has_context`` returns whether this process uses it.
    """

    def __init__(self, index: int, has_context: Callable[[], bool] = lambda: False) -> None:
        reading = read_device(index)
        if isinstance(reading, NvmlAbsent):
            raise _nvml_error(reading.reason)
        self.name = reading.uuid
        # The limit is that of all processes of this container together.
        total = min(reading.total, reading.mode.limit or reading.total)
        self.capacity = round(total * (1 - LEFT_FREE))
        self._reading = RepeatedReading(reading.uuid)
        stay_open()
        self._has_context = has_context

    def taken(self) -> Mapping[int, int]:
        """Return the bytes that each process holds, unattributed ones as :data:`UNKNOWN_PROCESS`.

        All bytes are unattributed if NVML's PIDs belong to another PID namespace (host or
        container): then it lists PIDs that do not exist here, or does not list this process
        although it uses the device.
        """
        reading = self._reading.read()
        if isinstance(reading, NvmlAbsent):
            raise _nvml_error(reading.reason)
        own, others = reading.process_used, reading.others or ()
        is_missed = self._has_context() and own is None
        if is_missed or not all(psutil.pid_exists(one.pid) for one in others):
            return {UNKNOWN_PROCESS: reading.used}
        listed = {os.getpid(): own, **{one.pid: one.used for one in others}}
        known = {pid: size for pid, size in listed.items() if size}
        rest = reading.used - sum(known.values())
        return {**known, UNKNOWN_PROCESS: rest} if rest > 0 else known


def _nvml_error(reason: str) -> SharingError:
    return SharingError(f"--gpumem-share needs NVML to see what the GPU holds: {reason}")


class SharedSimulatedDevice(Database):
    """This process's access to the shared memory of the simulated device ``name``."""

    def __init__(self, folder: Path, name: str, capacity: int) -> None:
        super().__init__(folder / SIMULATED_FILE, _SIMULATED_SCHEMA)
        self.name = name
        self.capacity = capacity
        self._process = this_process()
        with self.transaction():
            self.execute("INSERT OR REPLACE INTO device VALUES (?, ?)", (name, capacity))

    def take(self, size: int) -> bool:
        """Reserve ``size`` bytes; return False, and reserve nothing, if the device has too few."""
        with self.transaction():
            if sum(self._held_by_living().values()) + size > self.capacity:
                return False
            self._add(size)
            return True

    def give(self, size: int) -> None:
        """Release ``size`` bytes."""
        with self.transaction():
            self._add(-size)

    def give_all(self) -> None:
        """Release everything that this process has reserved."""
        with self.transaction():
            self._forget(self._process)

    def others(self) -> Mapping[int, int]:
        """Return the bytes that each other process has reserved, by PID."""
        return {pid: taken for pid, taken in self.taken().items() if pid != self._process.pid}

    def taken(self) -> Mapping[int, int]:
        """Return the bytes that each process has reserved, by PID."""
        with self.transaction():
            return {
                process.pid: taken for process, taken in self._held_by_living().items() if taken
            }

    def _held_by_living(self) -> dict[Process, int]:
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
            "DELETE FROM taken WHERE device = ? AND pid = ? AND started = ?", (self.name, *process)
        )


def simulated_devices(folder: Path) -> list[SharedSimulatedDevice]:
    """Return the simulated devices shared by processes that use ``folder``."""
    if not (folder / SIMULATED_FILE).exists():
        return []
    with closing(Database(folder / SIMULATED_FILE, _SIMULATED_SCHEMA)) as database:
        found = database.execute("SELECT name, capacity FROM device ORDER BY name").fetchall()
    return [SharedSimulatedDevice(folder, name, capacity) for name, capacity in found]


@dataclass(frozen=True)
class CandidateDevice:
    """A device that a worker may be assigned to; sizes in bytes."""

    name: str
    """The device's name in the ledger."""
    total: int
    taken: Mapping[int, int] = field(default_factory=dict)
    """Bytes by process, as the driver reports them."""
    most_workers: int | None = None
    """The most workers that should use it, one for a MIG instance; ``None`` for no limit."""
    strict: bool = False
    """Whether further workers cannot use it: in exclusive-process mode."""

    def room(self, workers: Sequence[Process]) -> float:
        """Return the bytes for one more worker, that shares what others leave with ``workers``."""
        pids = {process.pid for process in workers}
        foreign = sum(size for pid, size in self.taken.items() if pid not in pids)
        return (self.total - foreign) / (len(workers) + 1)


def least_loaded(
    candidates: Sequence[CandidateDevice], placed: Mapping[str, Sequence[Process]]
) -> int | None:
    """Return the position of the device that a worker should use, ``None`` if all are full.

    That is the device with most memory per worker, and of equal ones the first. Devices that have
    as many workers as they should come last.
    """
    found = []
    for position, candidate in enumerate(candidates):
        workers = placed.get(candidate.name, ())
        most = candidate.most_workers
        is_full = most is not None and len(workers) >= most
        if not (candidate.strict and is_full):
            found.append((not is_full, candidate.room(workers), -position))
    return -max(found)[-1] if found else None


def take_place(
    folder: Path, candidates: Sequence[CandidateDevice], process: Process | None = None
) -> int:
    """Return the position of the device that this process uses, the same at every call.

    It is the first if no device accepts another process. Raises ``SharingError`` if the table in
    ``folder`` cannot be used.
    """
    if len(candidates) < 2:
        return 0
    process = process or this_process()
    with closing(Database(folder / PLACE_FILE, _PLACE_SCHEMA)) as database, database.transaction():
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
