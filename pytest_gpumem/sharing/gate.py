"""The gate that admits a worker's tests when there is memory for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field

from pytest_gpumem.sharing import database
from pytest_gpumem.sharing.admission import Budget, Need
from pytest_gpumem.sharing.database import UNKNOWN_PROCESS, Process, SharingError
from pytest_gpumem.sharing.devices import HostDevice
from pytest_gpumem.sharing.ledger import Ledger, State, Stay
from pytest_gpumem.sizes import format_size

FIRST_PAUSE = 0.005
"""Seconds between two requests of a waiting test, doubled up to :data:`LONGEST_PAUSE`."""
LONGEST_PAUSE = 0.1


@dataclass(frozen=True)
class Admission:
    """The admission of one test."""

    nodeid: str
    test: int
    need: Need
    waited: float
    """Seconds."""
    waited_for: str
    """The holders of the memory when the test last waited; empty if it did not wait."""
    alone: bool
    """Whether nothing else runs on its devices."""
    granted: float = field(default_factory=time.time)
    """Seconds since the epoch."""


@dataclass(eq=False)
class Gate:
    """A worker's access to the devices that it shares."""

    ledger: Ledger
    worker: int
    """The number of the worker in the ledger."""
    devices: Sequence[HostDevice]
    """The devices that tests use."""
    _: KW_ONLY
    held: Callable[[str], tuple[int, int]]
    """The bytes that this process holds between two tests, by device: context and fixtures."""
    tear_down_fixtures: Callable[[], None]
    """The function that tears down the fixtures that live between two tests."""
    patience: float
    """The seconds that a test may wait."""
    waits: Callable[[str, float, str], None] = lambda *waiting: None
    """A function called repeatedly while a test waits, with its id, the seconds and the holders."""
    released: Callable[[Sequence[Stay]], None] = lambda stays: None
    """A function called with the stays of each test at its end."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def first(self) -> HostDevice:
        """The device that needs are stated for."""
        return self.devices[0]

    def declare(self) -> None:
        """Enter in the ledger the bytes that this process holds now, between two tests."""
        for device in self.devices:
            context, fixtures = self.held(device.name)
            self.ledger.hold(self.worker, device.name, context=context, fixtures=fixtures)

    @contextmanager
    def admitted(self, nodeid: str, need: Need) -> Iterator[Admission]:
        """Run the test inside once there is memory; raises ``SharingError`` after a time limit."""
        needs = self._above_held(need)
        test = self.ledger.ask(self.worker, nodeid, needs, need)
        try:
            yield self._waited(test, nodeid, need, needs)
        finally:
            # The ledger is gone; the test's result is valid all the same.
            with suppress(SharingError):
                self.declare()
            with suppress(SharingError):
                self.released(self.ledger.release(test))

    def _waited(self, test: int, nodeid: str, need: Need, needs: Mapping[str, int]) -> Admission:
        began = crowded = self.clock()
        pause = FIRST_PAUSE
        is_torn_down = False
        holders = ""
        while True:
            view = self.view()
            now = self.clock()
            waited = now - began
            if view[self.first.name].capacity - view[self.first.name].foreign < (need.bytes or 0):
                crowded = now  # other processes do not leave enough memory for the test
            elif now - crowded < need.quiet_seconds and waited <= self.patience:
                quiet = f"{_amount(need)} to stay free for {need.quiet_seconds:.0f} s"
                self.waits(nodeid, waited, quiet)
                self.sleep(LONGEST_PAUSE)
                continue
            answer = self.ledger.try_grant(test, view)
            if answer.granted:
                alone = not any(one.needs.keys() & needs.keys() for one in answer.state.running)
                return Admission(nodeid, test, need, waited, holders, alone)
            if answer.must_tear_down and not is_torn_down:
                # Only once: memory that remains after that is a leak, which no teardown frees.
                is_torn_down = True
                self.tear_down_fixtures()
                self.declare()
                needs = self._above_held(need)
                self.ledger.ask_again(test, needs)
                continue
            self._refuse_too_large(answer.state, nodeid, need)
            holders = self._holders(answer.state)
            if waited > self.patience:
                raise SharingError(f"{nodeid} waited {waited:.0f} s for {_amount(need)}: {holders}")
            self.waits(nodeid, waited, f"{_amount(need)}: {holders}")
            self.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    def view(self) -> dict[str, Budget]:
        """Return the memory of each device, and the part of it that other processes hold."""
        return {
            each.name: Budget(each.capacity, foreign=sum(self._held_by_others(each).values()))
            for each in self.devices
        }

    def foreign_processes(self) -> str:
        """Return which other processes hold memory, as a clause; empty where none does."""
        return ", ".join(
            f"{database.name_of(pid) if pid else 'an unnamed process'} holds {format_size(size)} "
            f"of {device.name}"
            for device in self.devices
            for pid, size in self._held_by_others(device).items()
        )

    def _held_by_others(self, device: HostDevice) -> dict[int, int]:
        """Return the bytes of ``device`` by process, without workers and their descendants.

        Unattributed bytes are counted only if they are more than workers may hold.
        """
        workers = {process.pid for process in self.ledger.owners().values()}
        taken = device.taken()
        if taken.get(UNKNOWN_PROCESS):
            state = self.ledger.state({device.name: Budget(device.capacity)})
            taken = without_claimed(taken, claims_of(state, device.name, self.ledger.owners()))
        return {
            pid: size
            for pid, size in taken.items()
            if size and pid not in workers and not database.descends_from(pid, workers)
        }

    def _holders(self, state: State) -> str:
        """Return the holders of the memory that a test waits for, as a clause."""
        parts = [
            f"{one.worker} holds {format_size(sum(one.needs.values()))} ({one.nodeid})"
            for one in state.running
        ]
        parts += [
            f"fixtures of worker {worker} hold {format_size(held)}"
            for device in state.devices.values()
            for worker, held in device.fixtures.items()
            if held
        ]
        parts += filter(None, [self.foreign_processes()])
        return ", ".join(parts) or "no process holds memory; earlier tests in the queue wait too"

    def _above_held(self, need: Need) -> dict[str, int]:
        """Return the bytes of each device that the test needs beyond those its worker holds.

        The need is the same on each device, because limits and baselines apply to each. A test of
        unknown need gets whole devices.
        """
        if need.bytes is None:
            return {device.name: 0 for device in self.devices}
        names = [device.name for device in self.devices[: need.devices]]
        return {name: max(need.bytes - self.held(name)[1], 0) for name in names}

    def _refuse_too_large(self, state: State, nodeid: str, need: Need) -> None:
        name, device = next(iter(state.devices.items()))
        most = device.capacity - sum(device.contexts.values())
        if need.bytes is not None and need.bytes > most:
            raise SharingError(
                f"{nodeid} needs {format_size(need.bytes)} by its {need.source}, and {name} has "
                f"{format_size(most)} for tests"
            )


def _amount(need: Need) -> str:
    return "a device alone" if need.bytes is None else format_size(need.bytes)


def without_claimed(taken: Mapping[int, int], claims: Mapping[int, int]) -> dict[int, int]:
    """Return ``taken`` without unattributed bytes that workers may hold.

    ``taken`` are bytes by process, from the driver; ``claims`` are those that each worker may hold,
    by the ledger. Claims of workers that the driver does not list are subtracted.
    """
    hidden = sum(claim for pid, claim in claims.items() if not taken.get(pid))
    return {**taken, UNKNOWN_PROCESS: max(taken.get(UNKNOWN_PROCESS, 0) - hidden, 0)}


def claims_of(state: State, device: str, owners: Mapping[int, Process]) -> dict[int, int]:
    """Return the bytes that each worker may hold of ``device``, by process: held and granted."""
    found = state.devices[device]
    claims = dict.fromkeys((process.pid for process in owners.values()), 0)
    for worker, process in owners.items():
        held = found.contexts.get(worker, 0) + found.fixtures.get(worker, 0)
        granted = sum(one.needs.get(device, 0) for one in state.running if one.owner == worker)
        claims[process.pid] += held + granted
    return claims
