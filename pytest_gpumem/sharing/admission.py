"""The rules by which tests are admitted, and the cause of a refused allocation.

These functions use neither clock, database nor device.

Memory is admitted as in Salus ("Salus: Fine-Grained GPU Sharing Primitives for Deep Learning
Applications", MLSys 2020): the memory that workers hold permanently, plus the memory that running
tests need in addition, stays below the device's capacity. The order is conservative backfilling
(Feitelson and Weil, "Utilization and Predictability in Scheduling the IBM SP2 with Backfilling",
1998): a test may overtake waiting tests only if it delays none of them, and not just not the first
as in EASY. So while a test waits, an earlier one runs.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from pytest_gpumem.sizes import format_size

PATIENCE = 60.0
"""Seconds of waiting that weigh as much as one step of priority, so that no test starves."""

RESERVED_PER_ALLOCATED = 1.1
"""The estimated reserved bytes per allocated byte of a limit or baseline."""


@dataclass(frozen=True)
class Need:
    """The memory, duration and priority that a test requests."""

    bytes: int | None
    """Bytes on its device, fixtures included; ``None`` if unknown: then it runs alone."""
    source: str
    """The origin of the number: ``max``, ``max_reserved``, ``baseline``, ``earlier run``,
    ``prediction`` or ``unknown``."""
    duration: float | None = None
    """Seconds; ``None`` if unknown."""
    exclusive: bool = False
    """Whether nothing else may run on its device."""
    priority: int = 0
    guaranteed: bool = True
    """``False`` for an opportunistic test, which is admitted last."""
    quiet_seconds: float = 0.0
    """Seconds for which its bytes have to stay free before it is admitted; not 0 for a crowded-out
    test, which runs alone."""
    devices: int = 1
    """The number of devices that it uses, with equal bytes; the first is its worker's device."""

    def on(self, capacity: int) -> int:
        """Return the bytes reserved for it while it runs on a device of ``capacity`` bytes."""
        return capacity if self.exclusive or self.bytes is None else self.bytes


NEEDS_NO_GPU = Need(0, "no marker")
"""The need of a test that does not ask for GPU memory."""


@dataclass(frozen=True)
class Place:
    """A device that workers share; places of the same ``name`` share their memory."""

    name: str
    capacity: int
    """Bytes that all tests together may use."""
    needs: Mapping[str, Need] = field(default_factory=dict)
    """Needs of the tests that use the device, by id."""
    real: bool = False
    """Whether it is a real GPU rather than a simulated one."""


NOWHERE = Place("", 0)
"""The place of a worker without tests that use a device."""


@dataclass(frozen=True)
class Request:
    """The request of one test; seconds are those of one clock of the host."""

    id: int
    """Number of the request, ascending in the order of requests."""
    owner: int
    needs: Mapping[str, int]
    """Bytes by device, without those that its worker holds permanently."""
    since: float
    """The time at which it asked, or at which it was admitted if it runs."""
    duration: float | None = None
    """Expected duration in seconds; ``None`` if unknown."""
    exclusive: bool = False
    priority: int = 0
    guaranteed: bool = True
    """``False`` for an opportunistic test: it goes last."""
    nodeid: str = ""
    run: str = ""
    worker: str = ""
    """The name of its worker in that run."""
    pid: int = 0
    """The worker's process."""


@dataclass(frozen=True)
class Budget:
    """The memory of one device and its holders; bytes."""

    capacity: int
    """The bytes for all tests: total memory less the margin."""
    foreign: int = 0
    """Bytes held by processes outside the ledger."""
    contexts: Mapping[int, int] = field(default_factory=dict)
    """Bytes by worker: its CUDA context, which it holds as long as it lives."""
    fixtures: Mapping[int, int] = field(default_factory=dict)
    """Bytes by worker: its living fixtures, which it can tear down between two tests."""

    def free(self, name: str, running: Iterable[Request]) -> int:
        """Return the bytes left beside ``running``; ``name`` is the device's in their needs."""
        taken = sum(request.needs.get(name, 0) for request in running)
        held = sum(self.contexts.values()) + sum(self.fixtures.values())
        return self.capacity - self.foreign - held - taken


Devices = Mapping[str, Budget]


def admissible(
    waiting: Iterable[Request], running: Iterable[Request], devices: Devices, now: float
) -> list[Request]:
    """Return those of the ``waiting`` tests that may all start now, in their order.

    The result is the same in every process, so each worker computes whether its test is among them.
    A test that requests a device missing from ``devices`` waits.
    """
    admitted: list[Request] = []
    blocked: list[Request] = []
    beside = list(running)
    for request in in_order(waiting, now):
        if _fits(request, beside, devices) and all(
            _may_pass(request, head, beside, devices, now) for head in blocked
        ):
            admitted.append(request)
            beside.append(replace(request, since=now))
        elif _can_fit(request, (), devices):  # it waits for tests, not for other processes
            blocked.append(request)
    return admitted


def must_tear_down(
    waiting: Iterable[Request], running: Iterable[Request], devices: Devices, now: float
) -> frozenset[int]:
    """Return the waiting workers whose fixtures keep the first waiting test from starting.

    A worker keeps its fixtures while it waits, perhaps for that very test. The returned workers
    have to tear them down before they continue to wait.
    """
    order = in_order(waiting, now)
    busy, blocked = list(running), list[Request]()
    to_tear_down: set[int] = set()
    for request in order:
        if _shares(request, blocked):
            blocked.append(request)
        elif _fits(request, busy, devices):
            busy.append(request)
        elif _can_fit(request, (), devices):
            blocked.append(request)
            others = {one.owner for one in order if one not in busy and one is not request}
            if _fits(request, busy, _without_fixtures(devices, others)):
                held = {owner for name in request.needs for owner in devices[name].fixtures}
                to_tear_down |= others & held
    return frozenset(to_tear_down)


def to_yield(
    waiting: Sequence[Request], running: Sequence[Request], devices: Devices, now: float
) -> frozenset[int]:
    """Return the running opportunistic tests to stop for the first waiting guaranteed test.

    They are as few as suffice, the latest first because they lose least work; none if all of them
    together hold too little.
    """
    head = next((one for one in in_order(waiting, now) if one.guaranteed), None)
    if head is None:
        return frozenset()
    owners = {one.owner for one in (*waiting, *running)} - {head.owner}

    def has_room(kept: Sequence[Request]) -> bool:
        # Workers whose test waits or is stopped tear their fixtures down.
        return _fits(head, kept, _without_fixtures(devices, owners - {one.owner for one in kept}))

    kept = list(running)
    candidates = [one for one in kept if not one.guaranteed and _shares(one, [head])]
    candidates.sort(key=lambda one: (-one.since, -one.id))
    given: list[Request] = []
    while candidates and not has_room(kept):
        given.append(candidates.pop(0))
        kept.remove(given[-1])
    if not has_room(kept):
        return frozenset()
    for one in list(given):  # the last may have been enough
        if has_room([*kept, one]):
            given.remove(one)
            kept.append(one)
    return frozenset(one.id for one in given)


def in_order(waiting: Iterable[Request], now: float) -> list[Request]:
    """Return the tests sorted by priority, which grows as they wait, then by arrival."""

    def rank(request: Request) -> tuple[float, int]:
        waited = max(now - request.since, 0.0) // PATIENCE
        return -(request.priority + waited + request.guaranteed), request.id

    return sorted(waiting, key=rank)


def _shares(request: Request, others: Iterable[Request]) -> bool:
    return any(request.needs.keys() & other.needs.keys() for other in others)


def _fits(request: Request, running: Iterable[Request], devices: Devices) -> bool:
    beside = list(running)
    for name, need in request.needs.items():
        sharing = [other for other in beside if name in other.needs]
        if sharing and (request.exclusive or any(other.exclusive for other in sharing)):
            return False
        if name not in devices or need > devices[name].free(name, sharing):
            return False
    return True


def _can_fit(request: Request, running: Sequence[Request], devices: Devices) -> bool:
    """Return whether it fits if all but its own worker and those of ``running`` drop fixtures."""
    kept = {request.owner, *(one.owner for one in running)}
    gone = {owner for one in devices.values() for owner in one.fixtures} - kept
    return _fits(request, running, _without_fixtures(devices, gone))


def _without_fixtures(devices: Devices, workers: Container[int]) -> Devices:
    """Return the devices once ``workers`` have torn their fixtures down."""
    without = {}
    for name, device in devices.items():
        kept = {owner: held for owner, held in device.fixtures.items() if owner not in workers}
        without[name] = replace(device, fixtures=kept)
    return without


def _may_pass(
    request: Request, other: Request, running: Sequence[Request], devices: Devices, now: float
) -> bool:
    """Return whether ``request`` may run before ``other``, which waits, without delaying it."""
    if not _shares(request, [other]):
        return True
    left = sorted(running, key=lambda one: _end_of(one, now))
    start = now
    while left and not _can_fit(other, left, devices):
        start = _end_of(left.pop(0), now)
    if start == math.inf:
        # The start of ``other`` is not known: tests that overtook it may run for any time.
        left = [one for one in running if one in left or one.id > other.id]
    if request.duration is not None and now + request.duration <= start < math.inf:
        return True
    if request.exclusive or other.exclusive:
        return False
    return _can_fit(request, [*left, other], devices)


def _end_of(request: Request, now: float) -> float:
    """Return the expected end of a running test, for an overdue test the present moment."""
    if request.duration is None:
        return math.inf
    return max(request.since + request.duration, now)


@dataclass(frozen=True)
class FailedAllocation:
    """An allocation that failed after the allocator had tried everything; bytes."""

    asked: int
    """Bytes requested from the driver: the segment that the allocation needed."""
    reserved: int
    """Bytes that the process had reserved then."""
    free: int
    """Bytes that the driver had left."""
    total: int
    context: int = 0
    """Bytes that the process holds of the device outside its allocator."""

    @property
    def wanted(self) -> int:
        """The bytes that the process would have reserved with it."""
        return self.reserved + self.asked

    @property
    def of_others(self) -> int:
        """The bytes that other processes held."""
        return max(self.total - self.free - self.reserved - self.context, 0)


class FailureCause(Enum):
    """The cause of a refused allocation."""

    QUOTA = "quota"
    """The test wanted more than its quota."""
    NEIGHBOUR = "neighbour"
    """Other processes: on an otherwise empty device the allocation would have succeeded."""
    DEVICE = "device"
    """The test wanted more than the device has."""


def cause_of(failed: FailedAllocation, quota: int | None) -> FailureCause:
    """Return the cause of ``failed`` for a process that may reserve ``quota`` bytes."""
    if quota is not None and failed.wanted > quota:
        return FailureCause.QUOTA
    if failed.asked <= failed.free + failed.of_others:
        return FailureCause.NEIGHBOUR
    return FailureCause.DEVICE


def failed_allocation_sentence(failed: FailedAllocation, quota: int | None) -> str:
    """Return the refusal as a sentence for the user."""
    asked, reserved = format_size(failed.asked), format_size(failed.reserved)
    cause = cause_of(failed, quota)
    if cause is FailureCause.QUOTA:
        assert quota is not None
        return (
            f"over its quota: {asked} asked for with {reserved} reserved is "
            f"{format_size(failed.wanted - quota)} over the quota of {format_size(quota)}"
        )
    if cause is FailureCause.DEVICE:
        return (
            f"over the device: {asked} asked for with {reserved} reserved, and the device has "
            f"{format_size(failed.total - failed.context)} for this process"
        )
    return (
        f"crowded out: {asked} asked for with {reserved} reserved, and other processes held "
        f"{format_size(failed.of_others)} of the device"
    )
