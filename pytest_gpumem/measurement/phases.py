"""Phases: named windows inside a test, and their peaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock, get_ident

from pytest_gpumem.measurement.statistics import Block, Bytes, CudaStatistics, Reading, Readings
from pytest_gpumem.values.measurement import CALL, SETUP, PhaseRecord

Positions = Sequence[int]
"""The number of allocator events so far, for each device."""

Window = tuple[Positions, Positions]
"""The positions when something began and ended."""


def position_on(device: int, positions: Positions) -> int:
    """Return the position of ``device``; 0 for one that was not yet initialised."""
    return positions[device] if device < len(positions) else 0


NEVER_NUMBERED = (SETUP, CALL)

MOST_NUMBERED = 100
"""The most windows of a phase that get a numbered phase; later ones only extend the whole."""

SNAPSHOTS_OF_EACH_ENTRY = 8
"""The number of entries of a phase after which its blocks are read only at powers of two:
workspaces stay alive once they exist, and a snapshot of a large model takes milliseconds."""


@dataclass
class Extent:
    """The range of one device's memory within a phase; bytes, before charging."""

    peak: Bytes = field(default_factory=Bytes)
    allocated_before: int = 0
    allocated_after: int = 0

    def reach(self, reading: Reading) -> None:
        """Include a reading of the window that has just ended."""
        self.peak = self.peak.at_least(reading.peak)
        self.allocated_after = reading.held.allocated


class NestingError(ValueError):
    """A phase was left while another one that began inside it was open."""


@dataclass(eq=False)
class Phase:
    """A phase: all windows of one name."""

    name: str
    parent: str | None
    entered: int = 0
    open: bool = False
    thread: int = 0
    """The thread that entered it last."""
    in_window: bool = False
    """Whether a ``with`` statement entered it, and will leave it."""
    extents: defaultdict[int, Extent] = field(default_factory=lambda: defaultdict(Extent))
    """The range on each device; zero where the phase did not see it."""
    blocks: frozenset[Block] = frozenset()
    """The live blocks when the phase was last left and inspected."""
    inspected: tuple[tuple[int, ...], ...] | None = None
    """Live blocks and bytes of the pools of workspaces when ``blocks`` were read."""
    loop: str | None = None
    """The phase whose window it is, where windows are numbered."""
    opened: Positions = ()
    windows: list[Window] = field(default_factory=list)

    def copy(self) -> Phase:
        """Return an independent copy."""
        extents = defaultdict(Extent, {one: replace(each) for one, each in self.extents.items()})
        return replace(self, extents=extents, windows=list(self.windows))

    def begin_at(self, readings: Readings) -> None:
        """Begin, or resume, at the current values."""
        for device, now in readings.items():
            if device not in self.extents:
                self.extents[device].allocated_before = now.held.allocated
            self.extents[device].reach(now.without_peak)

    def inspect(self, readings: Readings, live: Callable[[], frozenset[Block]]) -> None:
        """Read the ``live`` blocks at this end of the phase, if there can be a new workspace.

        There is none if the pools hold as many blocks and bytes as at the last reading, because
        workspaces stay alive.
        """
        count = self.entered
        if count > SNAPSHOTS_OF_EACH_ENTRY and count & (count - 1):
            return
        now = tuple(reading.in_pools() for reading in readings.values())
        if now != self.inspected or not all(now):
            self.blocks, self.inspected = live(), now


class PhaseTracker:
    """The phases of one run of a test's body.

    It is thread-safe: autograd and data-parallel code run modules in their own threads.
    ``numbered``: each window of a phase is also a phase inside it, such as ``forward_1``.
    """

    def __init__(
        self,
        statistics: CudaStatistics,
        positions: Callable[[], Positions] = lambda: (),
        *,
        numbered: bool = False,
    ) -> None:
        self._numbered = numbered
        self._statistics = statistics
        self._positions = positions
        statistics.listeners.append(self._reach)
        self._paused = False
        self._lock = RLock()
        self._open: list[Phase] = []
        self._kept: tuple[Phase, ...] | None = None
        self.phases: dict[str, Phase] = {}
        self.excluded_windows: list[Window] = []
        """Events in them belong to no phase."""
        self.unmeasured_windows: list[Window] = []
        """Peaks in them do not count."""
        self._unmeasured = False
        self.compiled: dict[int, int] = {}
        """The most bytes that torch took in addition while it compiled, by device."""

    def restart(self) -> None:
        """Forget every phase except those from before the first restart."""
        with self._lock:
            if self._kept is None:
                self._kept = tuple(phase.copy() for phase in self.phases.values())
            self._open.clear()
            self.excluded_windows.clear()
            self.unmeasured_windows.clear()
            self.compiled.clear()
            self.phases = {phase.name: phase.copy() for phase in self._kept}

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Enter the phase ``name`` inside; within a phase of the same name, do nothing.

        Raises :class:`NestingError` if a window that began inside is still open. Phases that the
        test leaves open end with this one.
        """
        phase = self.enter(name)
        if phase is None:
            yield
            return
        phase.in_window = True
        within: list[Phase] = []
        try:
            yield
        finally:
            within = self.leave(phase)
        crossed = [one.name for one in within if one.in_window]
        if crossed and name != CALL:
            raise NestingError(
                f"the phase {name!r} was left while {crossed[0]!r}, which began inside it, was "
                f"still open: phases nest, so leave {crossed[0]!r} first"
            )

    def enter(self, name: str) -> Phase | None:
        """Begin and return the phase ``name``; ``None`` if it is open or nothing is measured."""
        with self._lock:
            if self._unmeasured or (name in self.phases and self.phases[name].open):
                return None
            readings = self._statistics.read_and_reset_peaks()
            phase = self._begin(name, readings)
            if self._numbered and name not in NEVER_NUMBERED and phase.entered <= MOST_NUMBERED:
                self._begin(f"{name}_{phase.entered}", readings).loop = name
            return phase

    def _begin(self, name: str, readings: Readings) -> Phase:
        parent = self._open[-1].name if self._open else None
        phase = self.phases.setdefault(name, Phase(name, parent))
        if phase.parent != parent:
            phase.parent = None
        phase.entered += 1
        phase.open = True
        phase.thread = get_ident()
        phase.begin_at(readings)
        phase.opened = self._positions()
        phase.in_window = False
        self._open.append(phase)
        return phase

    def leave(self, phase: Phase) -> list[Phase]:
        """End a phase that :meth:`enter` began, and those that its thread has left open inside it.

        Returns the inner ones, outermost first. Phases of other threads stay open.
        """
        with self._lock:
            if phase not in self._open:  # ended with another one, or of a run before this one
                return []
            readings = self._statistics.read_and_reset_peaks()
            later = self._open[self._open.index(phase) + 1 :]
            within = [one for one in later if phase.name == CALL or one.thread == phase.thread]
            for one in later:
                if one not in within and one.parent == phase.name:
                    one.parent = None
            for one in (*reversed(within), phase):
                self._open.remove(one)
                one.open = False
                one.windows.append((one.opened, self._positions()))
                one.inspect(readings, self._statistics.possible_workspaces)
            return within

    @contextmanager
    def interrupted(self, phase: Phase) -> Iterator[None]:
        """Exclude events inside from ``phase``, and from the phases open inside it.

        The phase is resumed afterwards: it counts as entered once.
        """
        with self._lock:
            self._statistics.read_and_reset_peaks()
            found = self._open.index(phase) if phase in self._open else len(self._open)
            inner, self._open[found:] = self._open[found:], []
            for one in inner:
                one.windows.append((one.opened, self._positions()))
        try:
            yield
        finally:
            with self._lock:
                readings = self._statistics.read_and_reset_peaks()
                for one in inner:
                    one.opened = self._positions()
                    one.begin_at(readings)
                    if one.entered == len(one.windows) == 1:
                        # The phases inside precede the work of this one: it is listed after them,
                        # and begins with the memory that they left.
                        self.phases[one.name] = self.phases.pop(one.name)
                        for device, now in readings.items():
                            one.extents[device].allocated_before = now.held.allocated
                self._open += inner

    def exclude(self, amounts: Callable[[], Mapping[int, Bytes]]) -> AbstractContextManager[None]:
        """Exclude events inside from every phase.

        Memory that remains, ``amounts()`` by device, counts as allocated before every phase.
        """

        def count(before: Readings, after: Readings) -> None:
            with self._lock:
                for device, amount in amounts().items():
                    for phase in self.phases.values():
                        extent = phase.extents[device]
                        extent.peak += amount
                        extent.allocated_before += amount.allocated
                        extent.allocated_after += amount.allocated

        return self._paused_while(self.excluded_windows, count)

    def compiling(self) -> AbstractContextManager[None]:
        """Exclude peaks inside from all phases; remaining memory counts from the end on."""

        def count(before: Readings, after: Readings) -> None:
            for device, now in after.items():
                there = max(now.held.allocated, before.get(device, Reading()).held.allocated)
                beyond = now.peak.allocated - there
                self.compiled[device] = max(self.compiled.get(device, 0), beyond)

        return self._paused_while(self.unmeasured_windows, count)

    @contextmanager
    def _paused_while(
        self, windows: list[Window], count: Callable[[Readings, Readings], None]
    ) -> Iterator[None]:
        """Exclude peaks inside from all phases; call ``count`` with the readings around it."""
        before = self._statistics.read_and_reset_peaks()
        begin = self._positions()
        self._paused = True
        try:
            yield
        finally:
            after = self._statistics.read_and_reset_peaks()
            self._paused = False
            windows.append((begin, self._positions()))
            count(before, after)
            self._reach({device: now.without_peak for device, now in after.items()})

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Begin no phase inside; phases that are open have no peak there."""
        begin = self._positions()
        self._unmeasured = True
        try:
            yield
        finally:
            self._unmeasured = False
            self.unmeasured_windows.append((begin, self._positions()))

    def records(
        self, device: int, stray: Bytes, workspaces: frozenset[Block] = frozenset()
    ) -> dict[str, PhaseRecord]:
        """Return the record of each phase that has been left, charged: without ``stray`` bytes.

        ``workspaces`` are the blocks that were found to be cuBLAS workspaces.
        """
        found = {}
        for phase in self.phases.values():
            is_single = phase.loop is not None and self.phases[phase.loop].entered == 1
            if phase.open or is_single:
                continue
            extent = phase.extents.get(device, Extent())
            charged = extent.peak - stray
            found[phase.name] = PhaseRecord(
                name=phase.name,
                peak_allocated=charged.allocated,
                peak_reserved=charged.reserved,
                allocated_before=extent.allocated_before - stray.allocated,
                allocated_after=extent.allocated_after - stray.allocated,
                cublas_workspace=bytes_on(device, phase.blocks & workspaces),
                entered=phase.entered,
                parent=phase.parent,
            )
        return found

    def _reach(self, readings: Readings) -> None:
        if self._paused:
            return
        with self._lock:
            for phase in self._open:
                # A device that was not initialised when the phase began was empty.
                for device, reading in readings.items():
                    phase.extents[device].reach(reading)


def bytes_on(device: int, blocks: frozenset[Block]) -> int:
    """Return the bytes of those ``blocks`` that lie on ``device``."""
    return sum(block.size for block in blocks if block.device == device)
