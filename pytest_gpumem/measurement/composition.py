"""Compositions of a test's peaks, from its recorded events and the observer's observations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_gpumem.attribution.composition import (
    Composition,
    Site,
    composition_of,
    compositions,
    shown_path,
    with_rest_as_other,
)
from pytest_gpumem.attribution.history import FOREVER, WORKSPACE, History, Observation, Origin, Span
from pytest_gpumem.attribution.out_of_memory import OutOfMemory, post_mortem
from pytest_gpumem.measurement.contents import CONTAINERS, attributes_of, is_a, items_of
from pytest_gpumem.measurement.facts import releases_of
from pytest_gpumem.measurement.leaks import holder_names
from pytest_gpumem.measurement.observer import MemoryObserver
from pytest_gpumem.measurement.phases import PhaseTracker, Positions, position_on
from pytest_gpumem.measurement.recorded import Recorder, Segments
from pytest_gpumem.measurement.statistics import Block
from pytest_gpumem.simulated.gpu.device import parse_version
from pytest_gpumem.values.measurement import CALL, Measurement, PhaseRecord

HOLDERS = (torch.nn.Module, torch.optim.Optimizer)


@dataclass(frozen=True)
class Beginning:
    """The live blocks of every device when the body began, and the positions of its allocators."""

    positions: Positions
    held: Mapping[int, list[tuple[int, int, Origin | None]]]
    segments: Mapping[int, Segments]
    """The segments held from the driver, where a report shows them over time."""


class PeakRecorder:
    """The recorded blocks of one test: the compositions of its peaks, and its leaks."""

    def __init__(
        self,
        recorder: Recorder,
        root: str,
        *,
        timelines: bool = False,
        classify: Callable[[str, int, Origin], str] | None = None,
        locate: Callable[[Origin], tuple[str, int, str] | None] | None = None,
    ) -> None:
        self.timelines = timelines
        """Whether a report shows the allocated bytes over time."""
        self._classify, self._locate = classify, locate
        """Functions for :class:`History`: a block's final category, an allocation's source line."""
        self._recorder = recorder
        self._root = root
        self._set_up = self._beginning = Beginning((), {}, {})
        self._end: Positions = ()
        self.observer = MemoryObserver(recorder)
        self.positions = recorder.positions

    def set_up(self) -> None:
        """Record the state before the test's fixtures are set up: they may have phases, too."""
        self._set_up = self._current_state(None)

    def _current_state(self, own: frozenset[Block] | None, *, segments: bool = False) -> Beginning:
        """Return the state now; ``own`` are the test's own blocks, ``None`` where all are."""
        positions = self._recorder.positions()
        devices = range(len(positions))
        held = {device: list(self._recorder.held(device)) for device in devices}
        if own is not None:
            addresses = {block.address for block in own}
            held = {
                device: [block for block in blocks if block[0] in addresses]
                for device, blocks in held.items()
            }
        known = {device: self._recorder.segments(device) for device in devices if segments}
        return Beginning(positions, held, known)

    def begin(self, fixtures: Iterable[Any], own: frozenset[Block] | None) -> None:
        """Begin a run of the body; ``fixtures`` are the values of the test's fixtures.

        ``own`` are the test's blocks, ``None`` where there are no others.
        """
        self.observer.begin_run()
        self.watch(fixtures)
        self._beginning = self._current_state(own, segments=self.timelines)

    def watch(self, values: Iterable[Any]) -> None:
        """Watch the modules and optimizers among ``values``, and those directly inside a value."""
        for value in values:
            inner: Iterable[Any] = ()
            if is_a(value, *CONTAINERS):
                inner = [item for _, item in items_of(value)]
            elif not is_a(value, *HOLDERS):
                inner = attributes_of(value).values()
            for part in (value, *inner):
                if is_a(part, *HOLDERS):
                    self.observer.watch(part)

    def end(self) -> None:
        """End the run with a last inspection of live state."""
        self.observer.observe_optimizers()
        self._end = self._recorder.positions()

    def facts(self, sites: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the run's facts, and the versions of the libraries that ``sites`` name."""
        libraries = releases_of(filter(None, (site.get("site") for site in sites)), self._root)
        found = self.observer.facts.to_dict()
        return {**found, "libraries": libraries} if libraries else found

    def out_of_memory(self, device: int, tracker: PhaseTracker, total: int) -> OutOfMemory | None:
        """Return the analysis of the last allocation that failed on a device of ``total`` bytes."""
        failure = self._recorder.last_failure(device)
        if failure is None:
            return None
        position, origin = failure
        history = self.history(device, tracker)
        live = history.live_at(position - position_on(device, self._beginning.positions) - 1)
        place = history.place_of(origin) if origin else None
        shown = f"{shown_path(place[0], self._root)}:{place[1]}" if place else None
        return post_mortem(
            torch.cuda.memory._snapshot(),
            device,
            total=total,
            limit=int(total * torch.cuda.get_per_process_memory_fraction(device)),
            version=parse_version(None),
            holders=composition_of(history, live, {}).sites,
            place=(shown, origin.operator_name if origin else None),
            unfused=self.observer.facts.failed_unfused,
        )

    def compositions(self, device: int, tracker: PhaseTracker) -> dict[str, Composition]:
        """Return the compositions at the peaks of phases in the fixtures' set-up."""
        begin = position_on(device, self._beginning.positions)
        windows = [window for phase in tracker.phases.values() for window in phase.windows]
        if all(position_on(device, opened) >= begin for opened, _ in windows):
            return {}
        history = self.history(device, tracker, beginning=self._set_up)
        until = begin - position_on(device, self._set_up.positions)
        history.phases = [span for span in history.phases if span.begin < until]
        return compositions(history)

    def history(
        self,
        device: int,
        tracker: PhaseTracker,
        workspaces: Iterable[Block] = (),
        beginning: Beginning | None = None,
    ) -> History:
        """Return the history on ``device`` since ``beginning``, by default of the last run.

        ``workspaces`` are its blocks of cuBLAS.
        """
        beginning = beginning or self._beginning
        begin = position_on(device, beginning.positions)
        observer = self.observer

        def at(positions: Positions) -> int:
            return position_on(device, positions) - begin

        splits: Sequence[int] = ()
        if device in beginning.segments:
            splits = self._recorder.splits(device, begin, beginning.segments[device])
        return History(
            held=beginning.held.get(device, ()),
            events=self._recorder.events(device, begin),
            phases=[
                Span(phase.name, at(opened), at(closed))
                for phase in tracker.phases.values()
                for opened, closed in phase.windows
                if at(opened) >= 0
            ],
            automatic=[
                Span(name, at(opened), at(closed))
                for name, opened, closed in observer.spans
                if at(opened) >= 0
            ],
            modules=[(at(called), path) for called, path in observer.marks if at(called) >= 0],
            observations=[
                *(Observation(at(one[0]), *one[1:]) for one in observer.observations),
                *(Observation(at(self._end), one.address, WORKSPACE, "", "") for one in workspaces),
            ],
            excluded_windows=[
                (at(opened), at(closed)) for opened, closed in tracker.excluded_windows
            ],
            unmeasured=[(at(opened), at(closed)) for opened, closed in tracker.unmeasured_windows],
            reserved=self._recorder.reserved(device, begin) if self.timelines else (),
            split=splits,
            root=self._root,
            classify=self._classify,
            locate=self._locate,
        )


def add_compositions(
    phases: Mapping[str, PhaseRecord], found: Mapping[str, Composition]
) -> dict[str, PhaseRecord]:
    """Return ``phases`` with the blocks live at their peaks, to the byte."""
    result = dict(phases)
    for name in phases.keys() & found.keys():
        exact = with_rest_as_other(found[name], phases[name].peak_allocated)
        sites = tuple(site.to_dict() for site in exact.sites)
        result[name] = replace(phases[name], composition=exact.categories, sites=sites)
    return result


def explained_by(first: Measurement, again: Measurement) -> Measurement:
    """Return the numbers of ``first`` with the explanations of ``again``, its repetition."""
    found = {
        name: Composition(phase.composition, tuple(map(Site.from_dict, phase.sites)))
        for name, phase in again.phases.items()
        if phase.sites
    }
    phases = add_compositions(first.phases, found)
    call = phases[CALL]
    taken = {name: getattr(again, name) for name in ("leaks", "facts", "timeline")}
    return replace(first, phases=phases, composition=call.composition, sites=call.sites, **taken)


def leaks(
    history: History, device: int, blocks: Iterable[Block], *, named: bool
) -> tuple[dict[str, Any], ...]:
    """Return the sites of the leaked ``blocks`` on ``device``.

    Their holders are searched only if they are to be ``named``: the search reads the whole heap.
    """
    left = frozenset(block for block in blocks if block.device == device)
    addresses = {block.address for block in left}
    live = (one for one in history.lifetimes if one.freed_at == FOREVER)
    lives = [one for one in live if one.address in addresses]
    holders = holder_names(left) if lives and named else {}
    return tuple(site.to_dict() for site in composition_of(history, lives, holders).sites)
