"""The start of a test's measurement: its device, its quota, the numbers it is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest

import pytest_gpumem.session.ahead  # noqa: F401  # for its imports
from pytest_gpumem.device.computed import Computed
from pytest_gpumem.device.cuda import CudaDevice, device_count
from pytest_gpumem.device.errors import DeviceError
from pytest_gpumem.device.quota import QuotaError
from pytest_gpumem.measurement.fixtures import FixtureLedger
from pytest_gpumem.session.expected import model_of
from pytest_gpumem.session.item import MeasuredItem
from pytest_gpumem.session.judge import Judge
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.device.device import Device
    from pytest_gpumem.device.select import DeviceSelector
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.options import Settings
    from pytest_gpumem.session.expected import Expectations
    from pytest_gpumem.session.hooks import Hooks
    from pytest_gpumem.session.predictions import Predictions
    from pytest_gpumem.session.ranks import WorstOfTest
    from pytest_gpumem.session.sharing import Sharing
    from pytest_gpumem.values.prediction import PredictedTest
    from pytest_gpumem.values.world import Seat


class Measuring:
    """A starter of the measurements of one process's tests.

    Args:
        config: of this run.
        settings: of this run.
        selector: chooses devices.
        expectations: the expectations of tests.
        predictions: returns the needs of tests by simulation.
        sharing: admits tests beside others, ``None`` where devices are not shared.
        hooks: the implementations of other plugins.
    """

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        selector: DeviceSelector,
        expectations: Expectations,
        predictions: Callable[[], Predictions],
        sharing: Sharing | None,
        hooks: Hooks,
    ) -> None:
        self._config = config
        self._settings = settings
        self._selector = selector
        self._expectations = expectations
        self._predictions = predictions
        self._sharing = sharing
        self._hooks = hooks
        self._judge = Judge(config, settings)
        self._said: set[str] = set()
        """Reasons why there is no device, which are the same for every test."""
        self.ledger = FixtureLedger()
        """The memory of living fixtures."""

    def device_of(
        self, item: pytest.Item, worst: WorstOfTest | None = None, *, computed: Computed
    ) -> Device:
        """Return the device of ``item``; skip or fail it with a sentence where there is none.

        A simulated or dry device computes the values that this or the options request. For a test
        that runs as several ranks it is the device of the current one.
        """
        model, models = self._expectations.models(item)
        if (only := self._selector.only_model) and model not in (None, only):
            _skip(
                f"is for {model}, and the dry device of this run is {only}: run it with "
                f"--gpumem-device=dry:{model}"
            )
        if (asked := self._expectations.ranks(item)) is not None:
            self._check_ranks(asked)
        seat = self._expectations.seat(item, worst.rank if worst else 0)
        device = self._reported(model, computed, seat)
        if self._selector.real() and model not in (*models[:1], only, None):
            pytest.skip(
                f"measured on a real GPU, once, as [{models[0]}]: {model} is for simulation"
            )
        expectation = self._expectations.of(item)
        if expectation and expectation.min_memory is not None:
            _skip_below(expectation.min_memory, device)
        return device

    def begin(self, item: pytest.Item, device: Device) -> MeasuredItem:
        """Begin to measure ``item`` on ``device``."""
        expectation = self._expectations.of(item)
        predicted = self._predicted(item, expectation, device)
        quota = self._quota(expectation, device)
        try:
            return MeasuredItem(
                item,
                expectation,
                device,
                self.ledger,
                self._judge,
                self._settings,
                predicted,
                quota,
                self._sharing.runs_again if self._sharing else None,
                hooks=self._hooks,
                among_ranks=self._selector.world is not None,
            )
        except QuotaError as error:
            problem = str(error)
        pytest.fail(problem, pytrace=False)

    def _check_ranks(self, asked: int) -> None:
        """Skip or fail a test that requests a number of ranks which this run does not have."""
        world = self._selector.world
        if world is not None:
            if asked != world.size:
                _skip(f"is for {asked} ranks, and {world.size} have been started")
            return
        try:
            real = self._selector.real()
        except DeviceError:
            return  # reported when the device is chosen
        count = device_count()
        # A dry device is one of the ranks by itself; where there are as many, each has a process.
        if real is None or (self._selector.only_model and count < asked):
            return
        if count < asked:
            _skip(
                f"is for {asked} ranks, each with a GPU, and this machine has {count}: simulate "
                "them with --gpumem-device=sim"
            )
        pytest.fail(
            f"ranks={asked} takes {asked} GPUs and as many processes, which cannot be had where "
            "tests share GPUs: run it without --gpumem-share",
            pytrace=False,
        )

    def _reported(self, model: str | None, computed: Computed, seat: Seat | None) -> Device:
        if self._settings.sim_values == "always":
            computed = Computed.ALL
        try:
            return self._selector.select(model, computed=computed, seat=seat)
        except DeviceError as error:
            problem = str(error)
        if problem in self._said:
            pytest.fail("there is no device to measure on, as the first test says", pytrace=False)
        self._said.add(problem)
        pytest.fail(problem, pytrace=False)

    def _quota(self, expectation: Expectation | None, device: Device) -> int | None:
        """Return the bytes that this process may reserve during the test, ``None`` for no limit."""
        passage = self._sharing.passage if self._sharing else None
        if passage is not None and passage.quota is not None:
            return passage.quota
        if expectation is not None and expectation.quota is not None:
            return expectation.quota
        workers = getattr(self._config, "workerinput", {}).get("workercount", 1)
        quota = self._settings.quota
        return None if quota is None else quota.of(device.total_memory, workers)

    def _predicted(
        self, item: pytest.Item, expectation: Expectation | None, device: Device
    ) -> PredictedTest | None:
        """Return the prediction that a test with ``predict=`` is compared with, else ``None``.

        On a simulated device the prediction would be the measurement itself.
        """
        if expectation is None or expectation.predict is None or not isinstance(device, CudaDevice):
            return None
        return self._predictions().of(item, device, self._wants_prediction)

    def _wants_prediction(self, item: pytest.Item) -> bool:
        expectation = self._expectations.of(item)
        if expectation is None or expectation.predict is None or item.get_closest_marker("skip"):
            return False
        return model_of(item) in (None, *expectation.gpu[:1])


def _skip(reason: str) -> NoReturn:
    # As skipif does it: the report then names the test's line, not this one.
    raise pytest.skip.Exception(reason, _use_item_location=True)


def _skip_below(size: int, device: Device) -> None:
    total = device.total_memory
    if total < size:
        _skip(
            f"needs a GPU of {format_size(size)}, and {device.environment.gpu} has "
            f"{format_size(total)}"
        )
