"""The meter of one test, from a clean start to its measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from pytest_gpumem.attribution.composition import compositions
from pytest_gpumem.attribution.timeline import timeline_of
from pytest_gpumem.garbage import collect_garbage, without_old_garbage
from pytest_gpumem.measurement.automatic_phases import AutomaticPhases
from pytest_gpumem.measurement.compiling import CompileContext, Compiling
from pytest_gpumem.measurement.composition import PeakRecorder, add_compositions, leaks
from pytest_gpumem.measurement.facts import kept_by_libraries
from pytest_gpumem.measurement.fixtures import FixtureKey, FixtureRecords
from pytest_gpumem.measurement.leaks import blocks_reachable, leaked_blocks
from pytest_gpumem.measurement.phases import PhaseTracker, bytes_on
from pytest_gpumem.measurement.statistics import (
    Block,
    Bytes,
    CudaStatistics,
    Reading,
    clear_workspaces,
)
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.sizes import format_size
from pytest_gpumem.values.measurement import CALL, SETUP, Measurement, PhaseRecord


class Meter:
    """A meter of one test on every device that it uses.

    :meth:`setting_up` meters each fixture, :meth:`running` each run of the body; the last run
    counts. :meth:`measurements` returns the result.

    Cyclic garbage is collected only where memory could be garbage: with torch loaded a
    collection takes a tenth of a second.
    """

    def __init__(
        self,
        statistics: CudaStatistics,
        fixture_records: FixtureRecords,
        recorder: PeakRecorder | None = None,
        *,
        numbered: bool = False,
        tracker: type[PhaseTracker] = PhaseTracker,
        compile_context: CompileContext | None = None,
        filled: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self._filled = filled
        """Returns the bytes, by device, that fill the free space of earlier tests."""
        self._compile_context = compile_context
        """Returns a context manager around compilation that leaves no memory reserved."""
        self._make_tracker = partial(tracker, statistics, numbered=numbered)
        """Makes the tracker of phases; ``numbered``: each window is also a separate phase."""
        self._statistics = statistics
        self.recorder = recorder
        """The recorder that attributes the memory, ``None`` where blocks are not recorded."""
        self._fixtures = fixture_records
        self._charged: list[FixtureKey] = []
        """The fixtures whose bytes have been subtracted from the stray ones so far."""
        self._stray: dict[int, Bytes] | None = None
        self._before: frozenset[Block] = frozenset()
        self._running = False
        self._max_leak: int | None = None
        self.tracker = self._tracker()
        self._clean_start()

    @contextmanager
    def setting_up(self, fixture: FixtureKey) -> Iterator[list[FixtureKey]]:
        """Meter the set-up of a fixture; see :meth:`FixtureRecords.metering`."""
        if not self._running:
            if not self._fixtures.is_metering:
                # pytest may have torn down what the fixture held for another parameter.
                self._statistics.empty_cache()
            before = self._statistics.live_blocks()
            free_garbage = partial(self._free_garbage, fixture, before)
            with self._fixtures.metering(fixture, self._statistics, free_garbage) as nested:
                yield nested
            return
        # The body requested it. Another test could have set it up before, so its set-up must not
        # count here; and memory of the body, including workspaces and garbage, must not be freed.
        with (
            without_old_garbage(),
            self.tracker.exclude(lambda: self._fixtures.held([fixture])),
            self._fixtures.metering(fixture, self._statistics, collect_garbage) as nested,
        ):
            yield nested
        self._charge_requested(fixture)

    @contextmanager
    def running(self, fixtures: Iterable[FixtureKey]) -> Iterator[None]:
        """Run the body inside, on a clean start; ``fixtures`` are those that it is charged for."""
        self._clean_start()
        if self._stray is None:
            readings = self._statistics.read_and_reset_peaks()
            self._stray = {device: now.held for device, now in readings.items()}
        self._charge(fixtures)
        self._before = self._statistics.live_blocks()
        self.tracker.restart()
        if self.recorder is not None:
            values = values_of(self._fixtures.with_nested(fixtures))
            has_stray = any(stray.allocated for stray in self._stray.values())
            own = blocks_reachable(values, self._before) if has_stray else None
            self.recorder.begin(values, own)
        self._running = True
        try:
            compiling = Compiling(self.tracker, self._compile_context)
            with self.tracker.window(CALL), compiling.watched():
                yield
        finally:
            self._running = False
            if self.recorder is not None:
                self.recorder.end()

    def record_by(self, recorder: PeakRecorder) -> None:
        """Attribute the memory of a further run by ``recorder``.

        Memory that earlier runs have left counts as stray in that run.
        """
        self.recorder = recorder
        self._stray = None
        self._charged.clear()
        self.tracker = self._tracker()

    def _tracker(self) -> PhaseTracker:
        return self._make_tracker(self.recorder.positions if self.recorder else tuple)

    def reused(self, fixture: FixtureKey, repeat_set_up: Callable[[], None]) -> None:
        """Meter a fixture that the body requests and that an earlier test has set up.

        ``repeat_set_up`` allocates its blocks in this test's memory, as its set-up would do now.
        """
        with (
            without_old_garbage(),
            self.tracker.exclude(lambda: self._fixtures.record(fixture).held),
        ):
            repeat_set_up()
        self._charge_requested(fixture)

    def _charge_requested(self, fixture: FixtureKey) -> None:
        """Charge a fixture that the body has requested, and watch its values."""
        self._charged.append(fixture)
        if self.recorder is not None:
            self.recorder.watch(values_of([fixture]))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Find automatic phases inside, and observe modules, tensors and optimizers."""
        observer = self.recorder.observer if self.recorder else None
        with captures_ended(), AutomaticPhases(self.tracker, observer).watching():
            yield

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Exclude allocations inside; memory that is kept counts from the end of the context on."""
        observed = self.recorder.observer.unmeasured() if self.recorder else nullcontext()
        with self.tracker.unmeasured(), observed, self._statistics.unmeasured():
            yield

    def phases(self, device: int) -> Mapping[str, PhaseRecord]:
        """Return the phases left so far; their cuBLAS workspaces are known only at the end."""
        return self.tracker.records(device, self._stray_on(device))

    def measurements(
        self,
        fixtures: Iterable[FixtureKey],
        roots: Iterable[Any],
        *,
        device: int,
        passed: bool,
        max_leak: int | None = None,
    ) -> dict[int, Measurement]:
        """Return the results of the last run, by device; ``device`` is included even if unused.

        ``fixtures`` are all fixtures that the test used, ``roots`` the objects that may hold memory
        without a leak. Frees the workspaces. Leaks are judged only if the body ``passed``: after a
        failure its frames stay alive. Holders are searched for leaks above ``max_leak`` bytes.
        """
        self._max_leak = max_leak
        self._charge(fixtures)
        self._statistics.synchronize()
        workspaces, after = clear_workspaces(self._statistics)
        leaked = self._left_behind(self._before, after, roots) if passed else None
        now = {device: Reading(), **self._statistics.read_and_reset_peaks()}
        return {
            index: self._measurement(index, reading, fixtures, workspaces, leaked)
            for index, reading in now.items()
        }

    def _measurement(
        self,
        device: int,
        now: Reading,
        fixtures: Iterable[FixtureKey],
        workspaces: frozenset[Block],
        leaked: frozenset[Block] | None,
    ) -> Measurement:
        compiled = 0 if self._compile_context else self.tracker.compiled.get(device, 0)
        stray = self._stray_on(device)
        phases = self.tracker.records(device, stray, workspaces)
        left: tuple[Mapping[str, Any], ...] = ()
        timeline = None
        if self.recorder is not None:
            history = self.recorder.history(device, self.tracker, workspaces)
            of_fixtures = self.recorder.compositions(device, self.tracker)
            phases = add_compositions(phases, {**of_fixtures, **compositions(history)})
            most = self._max_leak
            named = most is not None and bytes_on(device, leaked or frozenset()) > most
            left = leaks(history, device, leaked or (), named=named)
            timeline = timeline_of(history, stray.reserved) if self.recorder.timelines else None
        call = phases[CALL]
        return Measurement(
            device=f"cuda:{device}",
            simulated=False,
            peak_allocated=call.peak_allocated,
            peak_reserved=call.peak_reserved,
            allocated_before=call.allocated_before,
            allocated_after=now.held.allocated - stray.allocated,
            leaked=None if leaked is None else bytes_on(device, leaked),
            cublas_workspace=call.cublas_workspace,
            stray=max(stray.allocated, 0),
            phases={SETUP: self._fixtures.setup_phase(fixtures, device), **phases},
            composition=call.composition,
            sites=call.sites,
            leaks=left,
            timeline=timeline,
            facts=self.recorder.facts(call.sites) if self.recorder else {},
            notes=compiled_beside(compiled)
            + (self.recorder.observer.notes if self.recorder else ()),
        )

    def _clean_start(self) -> None:
        self._statistics.synchronize()
        self._statistics.clear_workspaces()
        if not self._fixtures.explains(self._allocated()):
            collect_garbage()
            self._fixtures.garbage_collected(self._allocated())
        self._statistics.empty_cache()
        self._statistics.forget_peaks()

    def _allocated(self) -> dict[int, int]:
        """Return the allocated bytes by device, without those that fill free space."""
        readings, filled = self._statistics.read_and_reset_peaks(), self._filled()
        return {
            device: now.held.allocated - filled.get(device, 0) for device, now in readings.items()
        }

    def _free_garbage(self, fixture: FixtureKey, before: frozenset[Block]) -> None:
        """Free the garbage that the set-up of ``fixture`` has left."""
        self._statistics.synchronize()
        _, after = clear_workspaces(self._statistics)
        self._left_behind(before, after, values_of(self._fixtures.with_nested([fixture])))
        self._statistics.empty_cache()

    def _left_behind(
        self, before: frozenset[Block], after: frozenset[Block], roots: Iterable[Any]
    ) -> frozenset[Block]:
        """Return the new blocks that ``roots`` do not hold and that are no garbage."""
        left = leaked_blocks(before, after, [*roots, *kept_by_libraries()])
        if not left:
            return left
        collect_garbage()
        return (left & self._statistics.live_blocks()) - self._statistics.dropout_states()

    def _charge(self, fixtures: Iterable[FixtureKey]) -> None:
        """Subtract the bytes that ``fixtures`` hold from the stray ones."""
        known = self._fixtures.held(self._charged)
        self._charged += [fixture for fixture in fixtures if fixture not in self._charged]
        stray = self._stray if self._stray is not None else {}
        for device, held in self._fixtures.held(self._charged).items():
            owned = held - known.get(device, Bytes())
            stray[device] = stray.get(device, Bytes()) - owned

    def _stray_on(self, device: int) -> Bytes:
        return (self._stray or {}).get(device, Bytes())


@contextmanager
def captures_ended() -> Iterator[None]:
    """End the captures of CUDA graphs that begin inside and are still open at the end.

    CUDA allows no wait for a device until they end. Sources: cudaStreamEndCapture in the CUDA
    Runtime API; torch/cuda/graphs.py, torch 2.6 to 2.15.
    """
    kind = torch.cuda.CUDAGraph
    # capture_end() calls the first, since 2.15; a program may call it alone.
    name = "capture_end_pre" if hasattr(kind, "capture_end_pre") else "capture_end"
    under_way: dict[torch.cuda.CUDAGraph, torch.cuda.Stream] = {}
    """The graphs with their streams; a graph that is dropped does not end its capture."""

    def begin(original: Callable[..., None], graph: Any, *args: Any, **kwargs: Any) -> None:
        original(graph, *args, **kwargs)
        under_way[graph] = torch.cuda.current_stream()

    def end(original: Callable[..., None], graph: Any) -> None:
        try:
            original(graph)
        finally:
            if graph in under_way:
                with torch.cuda.stream(under_way[graph]):
                    is_over = not torch.cuda.is_current_stream_capturing()
                if is_over:
                    del under_way[graph]

    patches = Patches()
    patches.wrap(kind, "capture_begin", begin)
    patches.wrap(kind, name, end)
    with patches.applied():
        try:
            yield
        finally:
            for graph, stream in reversed([*under_way.items()]):
                # An invalidated capture raises its error, and ends; an empty one warns.
                with suppress(RuntimeError, UserWarning), torch.cuda.stream(stream):
                    graph.capture_end()


def compiled_beside(nbytes: int) -> tuple[str, ...]:
    """Return the note on torch's memory while it compiled; empty if it used none."""
    if not nbytes:
        return ()
    return (
        f"torch.compile used up to {format_size(nbytes)} while the test ran. This is not part of "
        "the allocated peaks, but it is part of the reserved ones; warmup=1 compiles before the "
        "measured run.",
    )


def values_of(fixtures: Iterable[FixtureKey]) -> list[Any]:
    """Return the values of those ``fixtures`` that are set up."""
    return [fixture.cached_result[0] for fixture in fixtures if fixture.cached_result]
