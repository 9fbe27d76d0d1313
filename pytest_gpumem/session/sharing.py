"""The admission of this process's tests to devices that other processes use, too."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import pytest

from pytest_gpumem.baseline.store import BaselineEntry, BaselineError, BaselineStore, split_nodeid
from pytest_gpumem.device.device import Device
from pytest_gpumem.marker import GUARANTEED, Expectation
from pytest_gpumem.options import Settings
from pytest_gpumem.report.pytest_reports import without_group
from pytest_gpumem.session.device_admissions import DeviceAdmissions, interruptible
from pytest_gpumem.session.hosts import ControllerChannel
from pytest_gpumem.session.item import MeasuredItem
from pytest_gpumem.session.predictions import Predictions, is_worth_it, simulated_once
from pytest_gpumem.session.rerun import can_run_again
from pytest_gpumem.sharing.admission import RESERVED_PER_ALLOCATED, Need
from pytest_gpumem.sharing.database import SharingError, default_folder
from pytest_gpumem.sharing.gate import Gate
from pytest_gpumem.sharing.learned import Learned, TestCost, learned_before
from pytest_gpumem.sharing.ledger import Ledger
from pytest_gpumem.sharing.usage import RunUsage, usages
from pytest_gpumem.values.measurement import Measurement


class Sharing:
    """The admission of one process's tests to shared devices, one after the other."""

    def __init__(
        self, config: pytest.Config, settings: Settings, predictions: Callable[[], Predictions]
    ) -> None:
        worker: Mapping[str, str] = getattr(config, "workerinput", {})
        self._run = worker.get("testrunuid", f"{os.getpid()}")
        self._name = worker.get("workerid", "main")
        self._workers = int(worker.get("workercount", 1))
        self._predictions = predictions
        self._settings = settings
        self._store = BaselineStore(settings.baselines)
        self._learned = learned_before(config)
        self._channel = ControllerChannel(config)
        self._ledger: Ledger | None = None
        self._worker = 0
        self._gates: dict[Device, Gate] = {}
        self._unusable: str | None = None
        """The reason why there is no gate for the current test."""
        self.admissions: DeviceAdmissions | None = None
        """The admissions of the current test, ``None`` for one that does not share its device."""

    @property
    def why_not(self) -> str | None:
        """The reason why the current test may not run at all."""
        return self.admissions.why_not if self.admissions is not None else self._unusable

    @contextmanager
    def admitted(
        self, item: pytest.Item, expectation: Expectation | None, device: Device
    ) -> Iterator[None]:
        """Wait until ``item`` may run, and run it inside; :attr:`why_not` is set if it may not."""
        self._unusable = None
        try:
            gate = self._gate(item, device)
            need = self._need(item, expectation, device)
            is_elastic = expectation is not None and expectation.elastic
        except SharingError as error:
            self._unusable = str(error)
            yield
            return
        self.admissions = DeviceAdmissions(gate, item.nodeid, need, device, is_elastic)
        try:
            self.admissions.enter()
            yield
        finally:
            self.admissions.leave()
            self.admissions = None

    def runs_again(self, current: MeasuredItem, error: BaseException) -> bool:
        """Return whether the current test, which ``error`` ended, will run once more."""
        refused = current.shortage, current.prepared.quota
        return self.admissions is not None and bool(self.admissions.next_run(error, *refused))

    def admit_next_run(
        self, current: MeasuredItem, error: BaseException | None
    ) -> Callable[[], None] | None:
        """Return a function that admits the next run of a test after ``error``; ``None`` for none.

        Fails a test that found too little memory even when it ran alone.
        """
        admissions = self.admissions
        if admissions is None or not can_run_again(current.item):
            return None
        refused = current.shortage, current.prepared.quota
        following = admissions.next_run(error, *refused)
        if following is not None:
            if error is not None:
                # The frames hold memory that the next run needs.
                traceback.clear_frames(error.__traceback__)
            return partial(admissions.enter_again, following)
        if error is not None and (problem := admissions.crowded_out(*refused)):
            pytest.fail(problem, pytrace=False)
        return None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Run the current test's body inside; interrupt an opportunistic one if another waits."""
        admission = self.admissions.admission if self.admissions else None
        if admission is None or admission.need.guaranteed:
            yield
            return
        with closing(Ledger(default_folder())) as ledger:  # a thread's own

            def has_to_yield() -> bool:
                with suppress(SharingError):
                    return ledger.has_to_yield(admission.test)
                return False

            with interruptible(has_to_yield):
                yield

    def suspect(self) -> bool:
        """Mark the current test for a rerun alone; return whether it was marked.

        A test that was admitted to run alone is not marked.
        """
        admission = self.admissions.admission if self.admissions else None
        if admission is None or self._ledger is None or admission.need.exclusive:
            return False
        self._ledger.suspect(self._run, admission.nodeid)
        self._channel.send(suspect=admission.nodeid)
        return True

    def plan(self, tests: Iterable[tuple[pytest.Item, Expectation | None, Device]]) -> None:
        """Send the needs of ``tests`` to the controller, which schedules them."""
        tests = list(tests)
        self._simulate(tests)
        gates = [self._gate(item, device) for item, _, device in tests]
        if tests:
            self._channel.send(
                host=[socket.gethostname(), str(default_folder())],
                device=gates[0].first.name,
                capacity=max(gate.first.capacity for gate in gates),
                needs={test[0].nodeid: list(astuple(self._need(*test))) for test in tests},
                real=not all(device.environment.simulated for _, _, device in tests),
            )

    def _simulate(self, tests: Sequence[tuple[pytest.Item, Expectation | None, Device]]) -> None:
        """Simulate tests of unknown need on a real GPU, where that is faster than running alone."""
        unknown = [
            (item, device)
            for item, expectation, device in tests
            if not (device.environment.simulated or device.environment.dry)
            and self._cost(item.nodeid, device).predicted is None
            and self._known(item.nodeid, expectation, device)[0] is None
        ]
        if not is_worth_it(len(unknown), self._workers):
            return
        device: Any = unknown[0][1]

        def simulate() -> dict[str, int]:
            found = self._predictions().of_all([item for item, _ in unknown], device)
            return {nodeid: _reserved(one.measurement) for nodeid, one in found.items()}

        learned = Learned()
        with suppress(OSError):  # for a folder that cannot be used, which the gate reports
            for nodeid, size in simulated_once(default_folder(), self._run, simulate).items():
                cost = TestCost(predicted=size)
                learned.learn(device.environment.key, without_group(nodeid), cost)
        self._learned.merge(learned)
        self._channel.send(learned=learned.to_dict())

    def usages(self) -> list[RunUsage]:
        """Return the usage of the devices that this process shared."""
        if self._ledger is None:
            return []
        capacity = max(gate.first.capacity for gate in self._gates.values())
        return usages(self._ledger.stays(), self._run, capacity)

    def neighbours(self) -> int | None:
        """Return the number of other tests that the current one has shared its devices with."""
        if self._ledger is None or self.admissions is None or self.admissions.admission is None:
            return None
        with suppress(SharingError):
            return self._ledger.neighbours(self._worker)
        return None

    def close(self) -> None:
        """Leave the ledger."""
        if self._ledger is not None:
            self._ledger.leave(self._worker)
            self._ledger.close()
            self._ledger = None

    def _gate(self, item: pytest.Item, device: Device) -> Gate:
        if device not in self._gates:
            folder = default_folder()
            if self._ledger is None:
                self._ledger = Ledger(folder)
                self._worker = self._ledger.join(self._run, self._name)
            self._gates[device] = Gate(
                self._ledger,
                self._worker,
                device.share(folder),
                held=device.held,
                tear_down_fixtures=lambda: item.session._setupstate.teardown_exact(None),
                patience=self._settings.share_timeout,
                waits=self._channel.report_wait,
                released=lambda stays: self._channel.send(stays=list(map(list, stays))),
            )
        return self._gates[device]

    def _need(self, item: pytest.Item, expectation: Expectation | None, device: Device) -> Need:
        size, source = self._known(item.nodeid, expectation, device)
        quota = expectation.quota if expectation else None
        if quota is not None and (size is None or size > quota):
            size, source = int(quota), "quota"
        cost = self._cost(item.nodeid, device)
        suspect = self._ledger is not None and self._ledger.is_suspect(self._run, item.nodeid)
        need = Need(
            size, source, cost.seconds, exclusive=suspect, devices=max(int(cost.devices), 1)
        )
        if expectation is None:
            return need
        # The marker's first gpu, "A100-80GB*2", has two devices.
        _, _, declared = next(iter(expectation.gpu), "").partition("*")
        return replace(
            need,
            exclusive=expectation.exclusive or suspect,
            priority=expectation.priority,
            guaranteed=expectation.qos == GUARANTEED,
            devices=int(declared or need.devices),
        )

    def _known(
        self, nodeid: str, expectation: Expectation | None, device: Device
    ) -> tuple[int | None, str]:
        if expectation is not None:
            if expectation.max_reserved is not None:
                return int(expectation.max_reserved), "max_reserved"
            if expectation.max is not None:
                return round(expectation.max * RESERVED_PER_ALLOCATED), "max"
        try:
            stored = self._store.entry(device.environment, *split_nodeid(nodeid))
        except BaselineError:
            stored = None  # reported where the test is judged
        if stored is not None:
            return _reserved(stored), "baseline"
        cost = self._cost(nodeid, device)
        if cost.reserved is not None:
            return cost.reserved, "earlier run"
        if cost.predicted:
            return cost.predicted, "prediction"
        return None, "unknown"

    def _cost(self, nodeid: str, device: Device) -> TestCost:
        return self._learned.of(device.environment.key, without_group(nodeid))


def _reserved(peaks: Measurement | BaselineEntry | None) -> int:
    """Return the bytes that a test with these peaks reserves, 0 where it was not measured."""
    if peaks is None:
        return 0
    return max(peaks.peak_reserved, round(peaks.peak_allocated * RESERVED_PER_ALLOCATED))
