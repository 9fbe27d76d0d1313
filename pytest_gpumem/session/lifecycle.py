"""The lifecycle of each test of a process, step by step: docs/how_a_test_runs.md.

After an illegal access or a device-side assertion every CUDA call of the process fails
(``device/cuda.py``), and so would all later tests. Such a process exits, and another one runs the
remaining tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from _pytest.tmpdir import tmppath_result_key

from pytest_gpumem.cached_answers import clear_cached_tensors
from pytest_gpumem.device import DeviceError, ValueLevel
from pytest_gpumem.garbage import importing
from pytest_gpumem.report.pytest_reports import ATTRIBUTE, LOST
from pytest_gpumem.session.restored import process_restored
from pytest_gpumem.session.results import NEIGHBOURS
from pytest_gpumem.session.used_fixtures import FixtureDevices, undo_failed_set_up

if TYPE_CHECKING:
    from _pytest.fixtures import FixtureDef

    from pytest_gpumem.device.device import Device
    from pytest_gpumem.session.context import Parts
    from pytest_gpumem.session.item import MeasuredItem
    from pytest_gpumem.session.prepare import Preparation
    from pytest_gpumem.session.rerun import Rerun, WorstRank
    from pytest_gpumem.sharing.watched import Watched


EXIT_CODE = 70
"""The exit code of a process that leaves during a run: EX_SOFTWARE of sysexits.h."""


class TestLifecycle:
    """The tests of one process, one after the other; made for the first one that is measured."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.current: MeasuredItem | None = None
        """The test that is measured now."""
        self._worst: WorstRank | None = None
        self._fixture_devices = FixtureDevices()
        self._preparation: Preparation | None = None
        self._context_lost = ""
        """The test in which the CUDA context of the process was lost."""

    def admitted(self, item: pytest.Item) -> AbstractContextManager[None]:
        """Return the context in which ``item`` may run beside the tests of other processes."""
        if self._context_lost and self._parts.is_worker:
            _leave(item)
        sharing = self._parts.sharing
        found = self._parts.shares(item) if sharing is not None else None
        if sharing is None or found is None:
            return nullcontext()
        return sharing.admitted(item, *found)

    def isolated(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run ``item`` in a process of its own if it requests that; return whether it did."""
        parts = self._parts
        if parts.is_one_of_several or (parts.sharing is not None and parts.sharing.why_not):
            return False
        if (processes := parts.expectations.processes(item)) is None:
            return False
        from pytest_gpumem.session.isolated import run

        run(item, nextitem, processes, are_ranks=parts.expectations.ranks(item) == processes)
        return True

    def begin(
        self, item: pytest.Item, *, computed: ValueLevel = ValueLevel.AT_FIRST, first: bool = False
    ) -> None:
        """Start measuring ``item`` if it is to be measured; may skip or fail it with a sentence."""
        self.current = None
        parts, expectations = self._parts, self._parts.expectations
        if first:
            requested = expectations.is_measured(item) and expectations.requested_rank(item)
            self._worst = None
            if requested and requested.is_worst:
                from pytest_gpumem.session.rerun import WorstRank

                self._worst = WorstRank(requested.size)
        if parts.selector.off or item.get_closest_marker("skip"):
            return
        problem = parts.sharing.why_not if parts.sharing is not None else None
        # Also for a marker that was added after collection.
        if problem := problem or expectations.problem(item):
            pytest.fail(problem, pytrace=False)
        if expectations.is_measured(item):
            rank = self._worst.rank if self._worst else 0
            if self._preparation is None:
                try:  # here, because what is imported now imports torch
                    parts.selector.check_torch()
                except DeviceError as error:
                    raise pytest.fail.Exception(str(error), pytrace=False) from None
                with importing():
                    from pytest_gpumem.session.prepare import Preparation

                self._preparation = Preparation(parts)
            preparation = self._preparation
            device = preparation.device_of(item, rank, computed=computed)
            self._fixture_devices.renew(item, self._machine(device), measured=True)
            self.current = preparation.begin(item, device)
            environment = device.environment
            self._watched.begins(item.nodeid, f"{environment.kind}{environment.gpu}")
        else:
            self._fixture_devices.renew(item, self._machine(parts.ambient), measured=False)
            if parts.ambient is not None:
                parts.ambient.begin_unmeasured()

    def end(self) -> None:
        """Stop measuring the current test."""
        measured, self.current = self.current, None
        if measured is not None:
            found = measured.measurement
            self._watched.ended(measured.item.nodeid, found.peak_allocated if found else None)
            measured.close()

    @contextmanager
    def setting_up(
        self, fixture: FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """Set ``fixture`` up inside, metered."""
        with ExitStack() as contexts:
            if self._parts.results.any_marked:
                device = self.current.device if self.current else self._parts.ambient
                machine = self._machine(device)
                metered = self.current is not None
                recorded = self._fixture_devices.setting_up(fixture, machine, metered=metered)
                contexts.enter_context(recorded)
                if device is not None:
                    contexts.enter_context(device.setting_up(fixture))
            if self.current:
                contexts.enter_context(self.current.setting_up(fixture, request))
            contexts.enter_context(undo_failed_set_up(fixture, request))
            yield

    def forget(self, fixture: FixtureDef[Any]) -> None:
        """Drop the records of a fixture that has been torn down."""
        self._fixture_devices.forget(fixture)
        self._parts.selector.forget(fixture)
        if self._preparation is not None:
            self._preparation.fixture_records.forget(fixture)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Measure the current test's call inside."""
        measured, sharing = self.current, self._parts.sharing
        if measured is None:
            restored = process_restored() if self._parts.results.any_marked else nullcontext()
            with restored, self._parts.selector.left_alone():
                yield
            return
        with measured.calling(), sharing.interruptible() if sharing else nullcontext():
            yield

    def one_outcome(self, item: pytest.Item, *, called: bool) -> AbstractContextManager[None]:
        """Set up ``item`` inside, or call it if ``called``; all ranks get the same outcome."""
        launched = self._parts.launched
        if launched is None or not self._parts.expectations.is_measured(item):
            return nullcontext()
        return launched.one_outcome(item, lambda: self.current, called=called)

    def next_run(self, item: pytest.Item, error: BaseException | None = None) -> Rerun | None:
        """Return the next run of ``item`` after ``error``, ``None`` if it needs none."""
        current, sharing = self.current, self._parts.sharing
        if current is None:
            return None
        from pytest_gpumem.session.rerun import Rerun, run_with_values

        if sharing is not None and (enter := sharing.admit_next_run(current, error)):

            def begin_admitted() -> None:
                enter()
                self.begin(item)

            return Rerun(begin_admitted)

        def begin(computed: ValueLevel) -> Device:
            self.begin(item, computed=computed)
            assert self.current is not None
            return self.current.device

        if following := run_with_values(current, error, begin):
            return following
        goes_on = self._worst is not None and self._worst.goes_on(current, error)
        return Rerun(partial(self.begin, item)) if goes_on else None

    def repeat(self, item: Any, rerun: Rerun | None, *, called: bool) -> None:
        """Set ``item`` up again, and call it if ``called``, until it needs no further run."""
        while rerun is not None:
            try:
                if called and getattr(item, "_excinfo", None):
                    item._excinfo.clear()
                with rerun.bounded():
                    self._set_up_again(item, rerun)
                    if called:
                        with self.calling():
                            item.runtest()
                rerun = self.next_run(item)
            except BaseException as error:
                rerun = self.next_run(item, error)
                if rerun is None:
                    raise

    def _set_up_again(self, item: Any, rerun: Rerun) -> None:
        """Set ``item`` up, as pytest would for a test that follows it."""
        state = item.session._setupstate
        # The teardown of tmp_path reads and removes data that a report stores on the item. This
        # teardown comes before any report, as does one after the user interrupts the second run.
        item.stash.setdefault(tmppath_result_key, {})
        state.teardown_exact(item.parent)
        item.stash.setdefault(tmppath_result_key, {})
        item._initrequest()
        clear_cached_tensors()
        self.end()
        rerun.begin()
        state.setup(item)

    def complete(self, item: pytest.Item, report: pytest.TestReport, *, raised: bool) -> None:
        """Put the current test's record on its final call report, and the loss of the context."""
        sharing = self._parts.sharing
        if self.current is not None:
            # In types that pytest-xdist can send: other numbers become floats.
            report.user_properties = [
                (name, float(value) if isinstance(value, float) else value)
                for name, value in report.user_properties
            ]
            self.current.complete(report, raised=raised)
            record = getattr(report, ATTRIBUTE, None)
            if record is not None and sharing is not None and sharing.admissions:
                record["sharing"] = sharing.admissions.to_dict()
            if report.failed and not self._context_lost:
                self._check_context(item, report, self.current.device)
        if report.when == "teardown" and sharing and (beside := sharing.neighbours()) is not None:
            setattr(report, NEIGHBOURS, beside)

    def _check_context(self, item: pytest.Item, report: pytest.TestReport, device: Device) -> None:
        """Check after a failed test whether its process can run further tests.

        Under MPS a fault in one client breaks every client, so a test that did not run alone on its
        device may not be the cause, and runs again alone.
        """
        if (fault := device.fault()) is None:
            return
        is_worker, sharing = self._parts.is_worker, self._parts.sharing
        if is_worker and sharing is not None and device.shares_faults and sharing.suspect():
            _leave(item)
        self._context_lost = item.nodeid
        setattr(report, LOST, item.nodeid)
        consequence = "its worker is replaced" if is_worker else "no further test is run"
        sentence = f"the CUDA context of the process is lost ({fault}): {consequence}"
        report.sections.append(("gpumem", sentence))
        if not is_worker:
            item.session.shouldfail = f"{item.nodeid}: {sentence}"

    @cached_property
    def _watched(self) -> Watched:
        from pytest_gpumem.sharing.watched import Watched

        config = self._parts.config
        worker = getattr(config, "workerinput", {}).get("workerid", "")
        watched = Watched(str(config.rootpath), worker)
        config.add_cleanup(watched.close)
        return watched

    def _machine(self, device: Device | None) -> Device | None:
        """Return ``device`` if it is simulated, ``None`` for a device of the real machine."""
        return (
            None if device is None or device is self._parts.selector.measured_device() else device
        )


def _leave(item: pytest.Item) -> NoReturn:
    """End this process, a worker that can run no more tests, before or after ``item``."""
    with suppress(BaseException):  # resources on the device cannot be torn down
        item.session._setupstate.teardown_exact(None)
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors would call CUDA; the driver frees the memory of the process.
    os._exit(EXIT_CODE)
