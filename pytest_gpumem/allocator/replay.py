"""Replay a recorded memory snapshot in the simulated allocator, with its own or other settings.

A snapshot of ``torch.cuda.memory._snapshot()`` holds the events of each device and the segments at
its end. The program's allocations and frees are repeated; the allocator's events must follow. With
other settings or another GPU they may differ: the result is a prediction then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pytest_gpumem.allocator.allocator import Allocator
from pytest_gpumem.allocator.blocks import SHARED_POOL, PoolId
from pytest_gpumem.allocator.messages import AllocatorError, OutOfMemory
from pytest_gpumem.allocator.recording import (
    Json,
    SnapshotError,
    checked,
    line_of,
    load_snapshot,
    recorded_conf,
    release_of,
)
from pytest_gpumem.allocator.releases import Version
from pytest_gpumem.allocator.replayed import (
    START,
    Course,
    DeviceReplay,
    ReplayResult,
    Shortage,
    Usage,
    first_mismatch,
    layout_mismatch,
)
from pytest_gpumem.allocator.settings import AllocatorSettings
from pytest_gpumem.allocator.start import PENDING, starting_segments
from pytest_gpumem.allocator.trace import check_history

_UNBOUNDED = 1 << 48
"""Device memory of a replay: events tell which recorded allocations did not fit."""
_ELSEWHERE = 1 << 50
"""Addresses for segments that are not in the recording."""


def replay(
    snapshot: Json | str | Path,
    alloc_conf: str | None = None,
    gpu: tuple[str, int] | None = None,
    *,
    version: Version | None = None,
    used_elsewhere: int = 0,
    courses: bool = False,
) -> ReplayResult:
    """Run the recorded allocations and frees through a simulated allocator.

    Arguments, result and errors are those of :func:`pytest_gpumem.replay`; ``gpu`` is any name with
    the bytes of its memory.
    """
    data = checked(load_snapshot(snapshot) if isinstance(snapshot, str | Path) else snapshot)
    rules = release_of(data) if version is None else version
    recorded = _Plan(AllocatorSettings.parse(recorded_conf(data), rules))
    settings = recorded.settings
    if alloc_conf is not None:
        settings = AllocatorSettings.parse(alloc_conf, rules)
    tried = None
    if alloc_conf is not None or gpu is not None:
        tried = _Plan(
            settings,
            follow=replace(settings, conf=recorded.settings.conf) == recorded.settings,
            capacity=gpu[1] if gpu else None,
            used_elsewhere=used_elsewhere if gpu else 0,
        )
    final: dict[int, list[Json]] = {}
    for segment in data["segments"]:
        final.setdefault(segment["device"], []).append(segment)
    devices = tuple(
        _replay_device(trace, final.get(device, []), device, recorded, tried, courses=courses)
        for device, trace in enumerate(data["device_traces"])
        if trace
    )
    mismatches = [f"device {each.device}: {each.mismatch}" for each in devices if each.mismatch]
    answers = [each.what_if or each.recorded for each in devices]
    return ReplayResult(
        exact=not mismatches,
        exact_addresses=sum(each.exact_addresses for each in devices),
        total=sum(each.total for each in devices),
        first_mismatch=mismatches[0] if mismatches else None,
        peak_allocated=max(each.peak_allocated for each in answers),
        peak_reserved=max(each.peak_reserved for each in answers),
        devices=devices,
        recorded_conf=recorded.settings.conf,
        alloc_conf=alloc_conf,
        gpu=gpu[0] if gpu else None,
        version=rules,
    )


class _Plan(NamedTuple):
    """The settings and the device of a run."""

    settings: AllocatorSettings
    follow: bool = True
    """Whether the settings are the recorded ones, so that the recorded start holds."""
    capacity: int | None = None
    """The device's memory in bytes; without one every allocation fits that did so when recorded."""
    used_elsewhere: int = 0


@dataclass(frozen=True)
class _Tape:
    """The record of one device in a snapshot."""

    start: Sequence[Json]
    trace: Sequence[Json]
    final: Sequence[Json]

    @cached_property
    def ends(self) -> frozenset[int]:
        """The frees that were complete at once: the indices of their second events."""
        return frozenset(
            index
            for index, (event, following) in enumerate(pairwise(self.trace), start=1)
            if (event["action"], following["action"]) == ("free_requested", "free_completed")
            and event["addr"] == following["addr"]
        )

    def pool_of(self, event: Json) -> PoolId:
        """Return the pool of an allocation; before 2.12 only the segments at the end contain it."""
        if "pool_id" in event:
            first, second = event["pool_id"]
            return first, second
        index = bisect_right(self._private, (event["addr"], _UNBOUNDED, SHARED_POOL)) - 1
        if index >= 0 and event["addr"] < self._private[index][1]:
            return self._private[index][2]
        return SHARED_POOL

    @cached_property
    def _private(self) -> list[tuple[int, int, PoolId]]:
        """The segments of private pools: first address, end and pool."""
        return sorted(
            (each["address"], each["address"] + each["total_size"], tuple(each["segment_pool_id"]))
            for each in self.final
            if tuple(each.get("segment_pool_id", SHARED_POOL)) != SHARED_POOL
        )


def _replay_device(
    trace: Sequence[Json],
    final: Sequence[Json],
    device: int,
    recorded: _Plan,
    tried: _Plan | None,
    *,
    courses: bool,
) -> DeviceReplay:
    check_history(trace, device)
    start = starting_segments(final, trace, recorded.settings)
    tape = _Tape(start, trace, final)
    kept = [Course(trace, start) for _ in filter(None, (recorded, tried)) if courses]
    run = _Run(recorded, tape, *kept[:1])
    run.feed()
    mismatch = first_mismatch(trace, run.allocator.trace) or layout_mismatch(
        final, run.allocator.segments()
    )
    usage, capacity, what_if = run.usage(), run.capacity, None
    if tried is not None:
        capacity = capacity if tried.capacity is None else tried.capacity
        again = _Run(tried._replace(capacity=capacity), tape, *kept[1:])
        again.feed()
        what_if = again.usage()
    return DeviceReplay(
        device=device,
        events=len(trace),
        exact=mismatch is None,
        exact_addresses=run.exact,
        total=run.total,
        mismatch=mismatch,
        recorded=usage,
        what_if=what_if,
        capacity=capacity,
        live_at_start=sum(
            block["size"]
            for segment in start
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ),
        courses=kept,
    )


class _Run:
    """An allocator that replays one trace."""

    def __init__(self, plan: _Plan, tape: _Tape, course: Course | None = None) -> None:
        self._plan = plan
        self._tape = tape
        self._course = course
        self.allocator = Allocator(
            _UNBOUNDED if plan.capacity is None else plan.capacity,
            plan.settings,
            plan.settings.version,
            used_elsewhere=plan.used_elsewhere,
            place_segment=self._place_segment,
        )
        self.total = self.exact = 0
        self.capacity: int | None = None
        """Bytes that the allocator could have had, where the recording ran out of memory."""
        self.shortage: Shortage | None = None
        self._addresses: dict[int, int] = {}
        self._recorded: list[tuple[int, int]] = []
        self._elsewhere = _ELSEWHERE
        self._released = 0
        self._fullest = (0, 0)
        self._fullest_event = START

    def feed(self, until: int | None = None) -> None:
        """Repeat the program's events, up to and with the event ``until``, while memory lasts."""
        index = START
        try:
            self._begin()
            self._note_peak(START)
            self._note()
            for index, event in enumerate(self._tape.trace[: None if until is None else until + 1]):
                self._repeat(index, event)
                self._note()
        except OutOfMemory as error:
            self._note_peak(index)
            event = {} if index == START else self._tape.trace[index]
            self.shortage = Shortage(
                event=index,
                requested=event.get("size", error.fields.requested),
                free=error.fields.free,
                line=line_of(event),
            )
        except AllocatorError as error:
            failed = f"Event {index} cannot be repeated"
            if index == START:
                failed = "The start cannot be restored"
            raise SnapshotError(f"{failed}: {error}") from error

    def usage(self) -> Usage:
        """Return the memory of the run; a second run finds the state at the peak."""
        reserved, allocated = self._fullest
        again = _Run(self._plan, self._tape)
        again.feed(until=self._fullest_event)
        segments = again.allocator.segments(frames=False)
        if self._course is not None:
            self._course.fullest, self._course.then = self._fullest_event, segments
            self._course.end = self.allocator.segments(frames=False)
        return Usage(
            peak_allocated=self.allocator.peak_allocated,
            peak_reserved=reserved,
            allocated_then=allocated,
            largest_split=max(
                (
                    block["size"]
                    for segment in segments
                    for block in segment["blocks"]
                    if block["state"] == "inactive" and segment["active_size"]
                ),
                default=0,
            ),
            segments=len(segments),
            retries=self.allocator.stats()["num_alloc_retries"],
            out_of_memory=self.shortage,
        )

    def _begin(self) -> None:
        """Restore the recorded start, or allocate its blocks anew under other settings."""
        start, capacity = self._tape.start, self._plan.capacity
        held = sum(segment["total_size"] for segment in start)
        fits = capacity is None or held <= capacity - self._plan.used_elsewhere
        restored = self._plan.follow and bool(start) and fits
        if restored:
            self.allocator.restore(start)
        for segment in start:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    if not restored:
                        size = block["requested_size"] or block["size"]
                        stream, pool = segment["stream"], segment["segment_pool_id"]
                        self._addresses[address] = self._malloc(size, stream, pool)
                    if block["state"] == PENDING:
                        self._request_free(address)
                address += block["size"]
        self.allocator.reset_peak_stats()

    def _repeat(self, index: int, event: Json) -> None:
        action, size = event["action"], event["size"]
        if action == "alloc":
            address = self._malloc(size, event["stream"], self._tape.pool_of(event))
            self._addresses[event["addr"]] = address
            self._recorded.clear()
            self.total += 1
            self.exact += address == event["addr"]
            self._note_peak(index)
        elif action == "free_requested":
            if index + 1 not in self._tape.ends:
                self._request_free(event["addr"])
        elif action == "free_completed":
            address = self._addresses.pop(event["addr"], event["addr"])
            if index in self._tape.ends:
                self.allocator.free(address)
            else:
                self.allocator.complete_free(address)
        elif action in ("segment_alloc", "segment_map"):
            if self._plan.follow:
                self._recorded.append((size, event["addr"]))
        elif action in ("segment_free", "segment_unmap"):
            self._release(self._tape.pool_of(event))
        elif action == "oom" and self._plan.capacity is not None:
            # Only test whether it fits now: the program's use of the memory is not recorded.
            address = self.allocator.malloc(size, event["stream"])
            self._note_peak(index)
            self.allocator.free(address)
        elif action == "oom" and self.capacity is None:
            self.capacity = self.allocator.reserved + event["device_free"]
            self.shortage = Shortage(index, size, event["device_free"], line_of(event))

    def _request_free(self, address: int) -> None:
        self.allocator.request_free(self._addresses.get(address, address))

    def _malloc(self, size: int, stream: int, pool: PoolId) -> int:
        if pool == SHARED_POOL:
            return self.allocator.malloc(size, stream)
        self.allocator.begin_allocate_to_pool(pool, lambda _: True)
        try:
            return self.allocator.malloc(size, stream)
        finally:
            self.allocator.end_allocate_to_pool(pool)

    def _note_peak(self, index: int) -> None:
        full = (self.allocator.reserved, self.allocator.allocated)
        if full > self._fullest:
            self._fullest = full
            self._fullest_event = index

    def _note(self) -> None:
        if self._course is not None:
            one = self.allocator
            self._course.note(one.allocated, one.reserved, one.inactive_split)

    def _release(self, pool: PoolId) -> None:
        """Empty the cache, once for each run of recorded events that return memory."""
        if self._released == 0:
            if pool != SHARED_POOL:  # nothing refers to a pool that gives its memory back
                with suppress(AllocatorError):  # it has none left: the replay differs already
                    while self.allocator.pools.get(pool).uses:
                        self.allocator.pools.release(pool)
            counters = self.allocator.memory.counters
            before = counters.num_device_free
            self.allocator.empty_cache()
            self._released = counters.num_device_free - before
        self._released = max(0, self._released - 1)

    def _place_segment(self, size: int) -> int:
        expandable = self.allocator.settings.expandable_segments
        for index, (recorded, address) in enumerate(self._recorded):
            if recorded == size or expandable:
                del self._recorded[index]
                return address
        address = self._elsewhere
        self._elsewhere += size
        return address
