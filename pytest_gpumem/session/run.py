"""A run of a test on its device, metered from the set-up of its fixtures to the end of its body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from _pytest.fixtures import FixtureDef

from pytest_gpumem.attribution.out_of_memory import OutOfMemory
from pytest_gpumem.device.device import Device
from pytest_gpumem.marker import Expectation
from pytest_gpumem.measurement.composition import PeakRecorder
from pytest_gpumem.measurement.fixtures import FixtureRecords
from pytest_gpumem.measurement.leaks import values_given
from pytest_gpumem.measurement.meter import Meter, values_of
from pytest_gpumem.measurement.recorded import RecordedHistory, Recorder
from pytest_gpumem.measurement.statistics import CudaStatistics, pausable
from pytest_gpumem.options import Settings
from pytest_gpumem.prediction.closed_forms import Expected
from pytest_gpumem.session import used_fixtures
from pytest_gpumem.session.hooks import Hooks
from pytest_gpumem.session.restored import (
    end_of_children,
    memory_fractions_kept,
    process_restored,
    records_kept_as_text,
)
from pytest_gpumem.sharing.admission import FailedAllocation, FailureCause, cause_of
from pytest_gpumem.values.measurement import Measurement, PhaseRecord
from pytest_gpumem.values.prediction import PredictedTest

STACKS_FOR_EXPLANATION = "all"
"""The stacks recorded to explain a failure: Python's, and C++'s, which name operators."""


@dataclass(frozen=True)
class Prepared:
    """The facts on a test that are known before it begins."""

    item: pytest.Item
    expectation: Expectation | None
    """``None`` for a test that is measured without being judged."""
    device: Device
    predicted: PredictedTest | None
    """The reference of a test with ``predict=``; none on a simulated device."""
    quota: int | None
    """The bytes that the process may reserve while the test runs; ``None`` for no limit."""
    among_ranks: bool
    """Whether it is one of several ranks, which are judged when all of them have run."""

    @property
    def runs(self) -> int:
        """The number of times the body runs; the last one counts."""
        return self.expectation.warmup + self.expectation.repeat if self.expectation else 1


class TestRun:
    """One attempt at a test: its device is active until it is closed."""

    def __init__(
        self, prepared: Prepared, fixture_records: FixtureRecords, settings: Settings, hooks: Hooks
    ) -> None:
        self.prepared = prepared
        self.settings = settings
        self._hooks = hooks
        self.item, self.device = item, device = prepared.item, prepared.device
        self.in_body = False
        self._expected_before = Expected()
        """The expected bytes of objects that fixtures watch."""
        self._expected = Expected()
        """The expected bytes of these and of objects that the body watches, in its last run."""
        with ExitStack() as starting:
            starting.enter_context(records_kept_as_text(item))
            starting.enter_context(device.active())
            starting.enter_context(device.measuring(item.nodeid))
            statistics = CudaStatistics(device.workspaces)
            starting.enter_context(statistics.own_peaks_shown())
            recorder = device.recorder
            # One of several ranks cannot run again later, without the others: it records now.
            always = ("always", "failed") if prepared.among_ranks else ("always",)
            if recorder is None and (settings.history or settings.explain in always):
                recorder = RecordedHistory()
                starting.enter_context(recorder.during(settings.history or STACKS_FOR_EXPLANATION))
            self.is_explained_later = recorder is None and settings.explain == "failed"
            """Whether a failure is explained by a further run, because this one is not recorded."""
            account = None if recorder is None else self._recorder(recorder)
            self._meter = Meter(
                statistics,
                fixture_records,
                account,
                numbered=settings.loop_phases == "numbered",
                compile_context=device.compile_context,
                filled=lambda: device.filled,
            )
            starting.enter_context(pausable(self._meter.unmeasured))
            starting.enter_context(pausable(device.unmeasured))
            fixtures = fixture_records.with_nested(used_fixtures.expected_fixtures(item))
            device.begin_test(item.nodeid, fixtures, fixture_records.replace_record)
            self._failed_allocations: Sequence[FailedAllocation] = ()
            if prepared.quota is not None:
                # Computed before a quota changes the allocator settings, which the key includes.
                assert device.environment
                starting.enter_context(device.limited(prepared.quota))
            if prepared.quota is not None or settings.share:
                # After the quota: setting one makes an allocation that is refused, to test it.
                self._failed_allocations = starting.enter_context(device.failed_allocations())
            if account is not None:
                account.set_up()
            self._resources = starting.pop_all()

    def close(self) -> None:
        """Restore the state of the process."""
        self._resources.close()

    @contextmanager
    def setting_up(
        self, fixture: FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """Meter the set-up of one fixture."""
        found = set(used_fixtures.active_fixtures(request).values())
        if self.in_body:
            self._repeat_set_ups()
        else:
            self.device.restart_collector()
        with self._meter.setting_up(fixture) as nested:
            try:
                yield
            finally:
                asked_for = set(used_fixtures.active_fixtures(request).values()) - found - {fixture}
                nested.extend(asked_for - set(nested))

    def _repeat_set_ups(self) -> None:
        """Charge fixtures that the body requests and an earlier test set up."""
        device = self.device
        for fixture in device.not_in_memory(used_fixtures.fixtures_of(self.item)):
            self._meter.reused(fixture, partial(device.repeat_set_up, fixture))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Enter the phase ``name`` inside."""
        return self._meter.tracker.window(name)

    def watch(self, holder: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Attribute the memory of ``holder`` to it."""
        if self._meter.recorder is not None:
            self._meter.recorder.observer.watch(holder)
        (self._expected if self.in_body else self._expected_before).add(holder)

    def phases(self) -> Mapping[str, PhaseRecord]:
        """Return the phases left so far, on the test's device."""
        return self._meter.phases(self.device.index)

    @contextmanager
    def body(self) -> Iterator[None]:
        """Run the body inside."""
        device = self.device
        device.begin_body()
        with self._meter.running(used_fixtures.fixtures_of(self.item)):
            self.in_body = True
            self._expected = Expected(self._expected_before)
            try:
                with (
                    self._meter.watching(),
                    used_fixtures.call_after_getfixturevalue(self.item, self._repeat_set_ups),
                ):
                    self._resources.callback(memory_fractions_kept())
                    device.restart_collector()
                    with process_restored(), end_of_children(self.item.nodeid):
                        yield
                device.end_body()
            finally:
                self.in_body = False

    def record_again(self, recorder: RecordedHistory) -> None:
        """Record the blocks of the following runs of the body."""
        self._meter.record_by(self._recorder(recorder))

    def measured(self, *, passed: bool) -> tuple[Measurement, tuple[Measurement, ...]]:
        """Return the measurements of the last run: of the test's device, and all others."""
        device, expectation = self.device, self.prepared.expectation
        fixtures = used_fixtures.fixtures_of(self.item)
        found = self._meter.measurements(
            fixtures,
            values_given(values_of(fixtures), self.item),
            device=device.index,
            passed=passed,
            max_leak=expectation.max_leak if expectation else None,
        )
        measured = {one.device: one for one in map(device.complete, found.values())}
        own = measured.pop(f"cuda:{device.index}")
        return replace(own, expected=dict(self._expected.categories)), tuple(measured.values())

    @property
    def shortage(self) -> FailedAllocation | None:
        """The last allocation that the allocator refused, preferably one caused by a neighbour."""
        quota = self.prepared.quota
        failed = self._failed_allocations
        found = [one for one in failed if cause_of(one, quota) is FailureCause.NEIGHBOUR] or failed
        return found[-1] if found else None

    def out_of_memory(self) -> OutOfMemory | None:
        """Return the analysis of the failed allocation, ``None`` if blocks were not recorded."""
        device, meter = self.device, self._meter
        if meter.recorder is None:
            return None
        return meter.recorder.out_of_memory(device.index, meter.tracker, device.total_memory)

    def _recorder(self, recorder: Recorder) -> PeakRecorder:
        item = self.item
        return PeakRecorder(
            recorder,
            str(item.config.rootpath),
            timelines=any(target.kind == "html" for target in self.settings.reports),
            classify=self._hooks.classify_for(item),
            locate=self._hooks.locate_for(item),
        )
