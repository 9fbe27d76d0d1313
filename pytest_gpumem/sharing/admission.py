"""The rules by which tests are admitted, and the cause of a refused allocation: plain numbers.

There is no clock, database or device here.

Memory is admitted as Salus does it ("Salus: Fine-Grained GPU Sharing Primitives for Deep Learning
Applications", MLSys 2020): what workers hold for long, plus what running tests need above it, stays
below the device's capacity. Order is backfilling that keeps every place (Feitelson and Weil,
"Utilization and Predictability in Scheduling the IBM SP2 with Backfilling", 1998, call it
conservative): a test may pass those that wait before it, only where it delays none of them, not
just the first as in EASY. So while a test waits, an earlier one runs.
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
"""The factor on allocated bytes of a limit or baseline that estimates the reserved ones."""


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
    """``False`` for an opportunistic test: it goes last."""
    quiet_seconds: float = 0.0
    """Seconds for which other processes have to leave its bytes free before it is admitted; not 0
    where it was crowded out and runs alone."""
    devices: int = 1
    """The number of devices that it uses, from its worker's own on, each with as many bytes."""

    def on(self, capacity: int) -> int:
        """Return the bytes reserved for it while it runs on a device of ``capacity`` bytes."""
        return capacity if self.exclusive or self.bytes is None else self.bytes


NEEDS_NO_GPU = Need(0, "no marker")
"""The need of a test that does not ask for GPU memory."""


@dataclass(frozen=True)
class Place:
    """A device that workers share; places of one ``name`` take from the same memory."""

    name: str
    capacity: int
    """Bytes that tests may have, all together."""
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
    """Ascending in the order in which tests asked."""
    owner: int
    needs: Mapping[str, int]
    """Bytes by device, above what its worker holds for longer."""
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
    """Return those of the ``waiting`` that may all run now, in their order.

    The answer is the same in every process, so every worker can find out for itself whether it is
    among them. A test that asks for a device missing from ``devices`` waits.
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
    """Return the workers whose fixtures are all that the first test that waits still waits for.

    A worker holds its fixtures while it waits itself, which may be for that test: those that are
    returned tear them down before they go on to wait.
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
    """Return the opportunistic tests that run and make room for the first guaranteed one waiting.

    As few as suffice, the youngest first because they have done least; none where all of them
    together would not be enough.
    """
    head = next((one for one in in_order(waiting, now) if one.guaranteed), None)
    if head is None:
        return frozenset()
    owners = {one.owner for one in (*waiting, *running)} - {head.owner}

    def has_room(kept: Sequence[Request]) -> bool:
        # Workers whose test waits or makes room tear their fixtures down.
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
    """Return whether there is room without fixtures, but of its worker and those of ``running``."""
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
        # It may be soon, or late: tests that passed it may still run, whatever their duration.
        left = [one for one in running if one in left or one.id > other.id]
    if request.duration is not None and now + request.duration <= start < math.inf:
        return True
    if request.exclusive or other.exclusive:
        return False
    return _can_fit(request, [*left, other], devices)


def _end_of(request: Request, now: float) -> float:
    """Return the expected end of a running test; an overdue one may end at any moment."""
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
