"""The tests of this process beside those of others on the same devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.baseline.store import BaselineError, BaselineStore, split_nodeid
from pytest_gpumem.marker import GUARANTEED
from pytest_gpumem.sharing.database import SharingError, default_folder
from pytest_gpumem.sharing.gate import Admission, Gate, NotAdmittedError, TooLargeError
from pytest_gpumem.sharing.ledger import FILE_NAME, Ledger
from pytest_gpumem.sharing.need import Need

if TYPE_CHECKING:
    import pytest

    from pytest_gpumem.device.device import Device
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.options import Settings
    from pytest_gpumem.sharing.order import MemoryScheduling

MARGIN = 1.1
"""Of what a limit or a baseline says is allocated, for what is reserved beside it."""


class Sharing:
    """Lets the tests of one process pass, one after the other."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._store = BaselineStore(settings.baselines)
        self._ledger: Ledger | None = None
        self._worker = 0
        self._gates: dict[Device, Gate] = {}
        self.refusal: str | None = None
        """Why the present test may not run at all."""
        self.admission: Admission | None = None
        """How the present test came in."""

    @contextmanager
    def admitted(
        self, item: pytest.Item, expectation: Expectation | None, device: Device
    ) -> Iterator[None]:
        """Wait until ``item`` may run, which it does inside; :attr:`refusal` says if it may not."""
        self.refusal = self.admission = None
        with ExitStack() as inside:
            try:
                need = self._need(item, expectation, device)
                passing = self._gate(item, device).admitted(item.nodeid, need)
                self.admission = inside.enter_context(passing)
                inside.callback(device.empty_cache)
            except (SharingError, TooLargeError, NotAdmittedError) as error:
                self.refusal = str(error)
            yield

    def plan(self, tests: Iterable[tuple[pytest.Item, Expectation | None, Device]]) -> None:
        """Let the process that hands out the tests know what each of them needs."""
        needs = {}
        capacity = 0
        for item, expectation, device in tests:
            gate = self._gate(item, device)
            capacity = max(capacity, gate.capacity)
            needs[item.nodeid] = self._need(item, expectation, device)
        if self._ledger is not None:
            self._ledger.plan(_worker(self._config)[0], needs, capacity)

    def summary(self, run: str) -> list[str]:
        """Return what a person reads of the devices that ``run``, or this process, shared."""
        run = run or _worker(self._config)[0]
        from pytest_gpumem.sharing.usage import lines, usages

        if not (default_folder() / FILE_NAME).exists():
            return []
        ledger = self._ledger or Ledger(default_folder())
        _, capacity = ledger.planned(run)
        if not capacity:
            capacity = max((gate.capacity for gate in self._gates.values()), default=0)
        found = usages(ledger.log(), run, capacity) if capacity else []
        if ledger is not self._ledger:
            ledger.close()
        return lines(found)

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
                self._worker = self._ledger.join(*_worker(self._config))
            self._gates[device] = Gate(
                self._ledger,
                self._worker,
                device.share(folder),
                held=device.held,
                tidy=lambda: item.session._setupstate.teardown_exact(None),
                patience=self._settings.share_timeout,
            )
        return self._gates[device]

    def _need(self, item: pytest.Item, expectation: Expectation | None, device: Device) -> Need:
        size, source = self._known(item.nodeid, expectation, device)
        if expectation is None:
            return Need(size, source)
        return Need(
            size,
            source,
            exclusive=expectation.exclusive,
            priority=expectation.priority,
            guaranteed=expectation.qos == GUARANTEED,
        )

    def _known(
        self, nodeid: str, expectation: Expectation | None, device: Device
    ) -> tuple[int | None, str]:
        if expectation is not None:
            if expectation.max_reserved is not None:
                return expectation.max_reserved, "max_reserved"
            if expectation.max is not None:
                return round(expectation.max * MARGIN), "max"
        try:
            stored = self._store.entry(device.environment, *split_nodeid(nodeid))
        except BaselineError:
            stored = None  # said where the test is judged
        if stored is not None:
            return max(stored.peak_reserved, round(stored.peak_allocated * MARGIN)), "baseline"
        return None, "nobody"


def _worker(config: Any) -> tuple[str, str]:
    """The run's name and this worker's in it."""
    given: Mapping[str, str] = getattr(config, "workerinput", {})
    return given.get("testrunuid", f"{os.getpid()}"), given.get("workerid", "main")


def scheduler(config: pytest.Config, log: Any, run: Callable[[], str]) -> MemoryScheduling:
    """Return what hands out the tests of this run to its workers."""
    from pytest_gpumem.sharing.order import MemoryScheduling

    def plan() -> tuple[Mapping[str, Need], int]:
        ledger = Ledger(default_folder())
        try:
            return ledger.planned(run())
        finally:
            ledger.close()

    return MemoryScheduling(config, log, plan)
