"""Charges for the memory of fixtures: each fixture's set-up is metered separately.

A fixture of module scope is set up by the first of its tests. Its bytes are remembered
with the instance, and every test that uses it is charged the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gpumem.measurement.statistics import Bytes, CudaStatistics, Readings
from pytest_gpumem.values.measurement import SETUP, PhaseRecord

FixtureKey = Any
"""A pytest ``FixtureDef``: one per fixture function and place, with at most one live value."""

Renewed = Callable[[FixtureKey, Mapping[int, Bytes], Mapping[int, Bytes]], None]
"""Function called with a fixture, the bytes its set-up holds and its peak above the start."""


@dataclass(eq=False)
class FixtureRecord:
    """The memory of one fixture's set-up, without that of fixtures it requested."""

    held: Mapping[int, Bytes] = field(default_factory=dict)
    """The bytes that the set-up added, by device."""
    peak: Mapping[int, Bytes] = field(default_factory=dict)
    """The bytes by which the set-up's peak exceeded its start, by device."""
    nested: tuple[FixtureKey, ...] = ()
    """Fixtures that its function requested with ``getfixturevalue``, even if set up before."""


class _SetUp:
    """A set-up in progress."""

    def __init__(self, start: Readings) -> None:
        self.start = {device: now.held for device, now in start.items()}
        self.base = dict(self.start)
        """The bytes at the start, and those that nested fixtures hold."""
        self.left: dict[int, Bytes] = {}
        """The bytes that the set-up left, with nested fixtures."""
        self.peak: dict[int, Bytes] = {}
        self.bytes_ever_allocated = _bytes_ever_allocated(start)
        self.nested: list[FixtureKey] = []

    def reach(self, readings: Readings) -> None:
        """Include the peaks of a window in which no requested fixture was being set up."""
        for device, reading in readings.items():
            above = reading.peak - self.base.get(device, Bytes())
            self.peak[device] = above.at_least(self.peak.get(device, Bytes()))

    def finish(self, statistics: CudaStatistics, free: Callable[[], None]) -> dict[int, Bytes]:
        """Return the bytes that the set-up left, by device, without nested fixtures."""
        end = statistics.read_and_reset_peaks()
        if _bytes_ever_allocated(end) != self.bytes_ever_allocated:
            free()
            end = statistics.read_and_reset_peaks()
        self.bytes_ever_allocated = _bytes_ever_allocated(end) - self.bytes_ever_allocated
        held = {device: now.held for device, now in end.items()}
        self.left = {one: now - self.start.get(one, Bytes()) for one, now in held.items()}
        return {one: now - self.base.get(one, Bytes()) for one, now in held.items()}

    def take(self, fixture: FixtureKey, inner: _SetUp) -> None:
        """Assign the bytes of a nested set-up to its own fixture."""
        self.nested.append(fixture)
        self.bytes_ever_allocated += inner.bytes_ever_allocated
        _add(self.base, inner.left)


class FixtureRecords:
    """The records of all living fixture instances."""

    def __init__(self) -> None:
        self._records: dict[FixtureKey, FixtureRecord] = {}
        self._open: list[_SetUp] = []
        self._known: dict[int, int] = {}
        """The bytes that are no garbage, by device: left by a collection, or held since then."""

    def explains(self, allocated: Mapping[int, int]) -> bool:
        """Return whether all ``allocated`` bytes, by device, are known to be no garbage."""
        return all(size <= self._known.get(device, 0) for device, size in allocated.items())

    def garbage_collected(self, allocated: Mapping[int, int]) -> None:
        """Take the bytes ``allocated`` right after a collection, by device, as no garbage."""
        self._known = dict(allocated)

    def record(self, fixture: FixtureKey) -> FixtureRecord:
        """Return the record of a fixture, an empty one where its set-up was not metered."""
        return self._records.get(fixture, FixtureRecord())

    def replace_record(
        self, fixture: FixtureKey, held: Mapping[int, Bytes], peak: Mapping[int, Bytes]
    ) -> None:
        """Replace the record of ``fixture`` after the device has repeated its set-up.

        Its reserved bytes depend on the fixtures that were set up before it.
        """
        record = self._records.get(fixture)
        if record is not None:
            self._count_known(record.held, -1)
            self._count_known(held, +1)
            self._records[fixture] = replace(record, held=held, peak=peak)

    def forget(self, fixture: FixtureKey) -> None:
        """Drop the record of a fixture that has been torn down."""
        self._count_known(self._records.pop(fixture, FixtureRecord()).held, -1)

    @property
    def is_metering(self) -> bool:
        """Whether a set-up is running."""
        return bool(self._open)

    @contextmanager
    def metering(
        self, fixture: FixtureKey, statistics: CudaStatistics, free: Callable[[], None]
    ) -> Iterator[list[FixtureKey]]:
        """Meter the set-up of ``fixture``, which runs inside.

        Yields the list of fixtures that its function requests; the caller appends those that were
        set up before. ``free`` frees garbage.
        """
        own = _SetUp(statistics.read_and_reset_peaks())
        outer = self._open[-1] if self._open else None
        if outer is None:
            statistics.listeners.append(self._reach)
        self._open.append(own)
        try:
            yield own.nested
        finally:
            held = own.finish(statistics, free)
            self._open.pop()
            self._records[fixture] = FixtureRecord(held, own.peak, tuple(own.nested))
            self._count_known(held, +1)
            if outer is None:
                statistics.listeners.remove(self._reach)
            else:
                outer.take(fixture, own)

    def _reach(self, readings: Readings) -> None:
        self._open[-1].reach(readings)

    def _count_known(self, held: Mapping[int, Bytes], sign: int) -> None:
        for device, amount in held.items():
            self._known[device] = self._known.get(device, 0) + sign * amount.allocated

    def with_nested(self, fixtures: Iterable[FixtureKey]) -> list[FixtureKey]:
        """Return ``fixtures`` without duplicates, each preceded by those that it requested."""
        ordered: dict[FixtureKey, None] = {}

        def visit(fixture: FixtureKey) -> None:
            if fixture not in ordered:
                for nested in self.record(fixture).nested:
                    visit(nested)
                ordered[fixture] = None

        for fixture in fixtures:
            visit(fixture)
        return list(ordered)

    def held(self, fixtures: Iterable[FixtureKey]) -> dict[int, Bytes]:
        """Return the bytes that ``fixtures`` hold together, by device."""
        total: dict[int, Bytes] = {}
        for fixture in self.with_nested(fixtures):
            _add(total, self.record(fixture).held)
        return total

    def setup_phase(self, fixtures: Iterable[FixtureKey], device: int) -> PhaseRecord:
        """Return the phase of setting up ``fixtures``, one after the other from nothing."""
        peak = held = Bytes()
        for fixture in self.with_nested(fixtures):
            record = self.record(fixture)
            peak = peak.at_least(held + record.peak.get(device, Bytes()))
            held += record.held.get(device, Bytes())
        return PhaseRecord(SETUP, peak.allocated, peak.reserved, 0, held.allocated)


def _bytes_ever_allocated(readings: Readings) -> int:
    return sum(reading.bytes_ever_allocated for reading in readings.values())


def _add(total: dict[int, Bytes], amounts: Mapping[int, Bytes]) -> None:
    for device, amount in amounts.items():
        total[device] = total.get(device, Bytes()) + amount
