"""Prepare a test: its device, its quota, the numbers it is compared with."""

from __future__ import annotations

from typing import NoReturn

import pytest

from pytest_gpumem.baseline import store, update
from pytest_gpumem.device import DeviceError, ValueLevel
from pytest_gpumem.device.cuda import CudaDevice, device_count
from pytest_gpumem.device.device import Device
from pytest_gpumem.device.quota import QuotaError
from pytest_gpumem.marker import Expectation
from pytest_gpumem.measurement.fixtures import FixtureRecords
from pytest_gpumem.report import json_report, record, terminal
from pytest_gpumem.session import conclusion, rerun, used_fixtures
from pytest_gpumem.session.context import Parts
from pytest_gpumem.session.expected import model_of
from pytest_gpumem.session.item import MeasuredItem
from pytest_gpumem.session.judge import Judge
from pytest_gpumem.session.run import Prepared
from pytest_gpumem.sizes import format_size
from pytest_gpumem.values.world import RequestedRank

USED_AFTERWARDS = (used_fixtures, conclusion, json_report, record, rerun, store, terminal, update)
"""Modules needed after a body, imported before it: a body may empty ``sys.path`` or delete the
working directory, and reports of earlier tests must still be written."""


class Preparation:
    """The preparation of the tests of one process."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._judge = Judge(parts.config, parts.settings)
        self._problems: set[str] = set()
        """Reasons why there is no device, kept because they are the same for every test."""
        self.fixture_records = FixtureRecords()
        """The memory of living fixtures."""

    def device_of(self, item: pytest.Item, rank: int, *, computed: ValueLevel) -> Device:
        """Return the device of ``item`` as ``rank``; skip or fail it with a sentence if none."""
        expectations, selector = self._parts.expectations, self._parts.selector
        model, models = expectations.models(item)
        simulated = selector.simulates(model)
        if not simulated and (only := selector.only_model) and model not in (None, only):
            _skip(
                f"is for {model}, and the dry device of this run is {only}: run it with "
                f"--gpumem-device=dry:{model}"
            )
        if (asked := expectations.ranks(item)) is not None:
            self._check_ranks(asked)
        device = self._select(model, computed, expectations.requested_rank(item, rank))
        known = (*models[:1], selector.only_model, None)
        if not simulated and selector.measured_device() and model not in known:
            pytest.skip(
                f"measured on a real GPU, once, as [{models[0]}]: {model} is for simulation"
            )
        expectation = expectations.of(item)
        least = expectation.min_memory if expectation else None
        if least is not None and device.total_memory < least:
            _skip(
                f"needs a GPU of {format_size(least)}, and {device.environment.gpu} has "
                f"{format_size(device.total_memory)}"
            )
        return device

    def begin(self, item: pytest.Item, device: Device) -> MeasuredItem:
        """Begin to measure ``item`` on ``device``."""
        parts = self._parts
        expectation = parts.expectations.of(item)
        predicted = None
        # On a simulated device the prediction would be the measurement itself.
        if expectation is not None and expectation.predict and isinstance(device, CudaDevice):
            predicted = parts.predictions.of(item, device, self._wants_prediction)
        prepared = Prepared(
            item,
            expectation,
            device,
            predicted=predicted,
            quota=self._quota(expectation, device),
            among_ranks=parts.selector.world is not None,
        )
        runs_again = parts.sharing.runs_again if parts.sharing else None
        given = self.fixture_records, parts.settings, parts.hooks, self._judge, runs_again
        try:
            return MeasuredItem(prepared, *given)
        except QuotaError as error:
            problem = str(error)
        pytest.fail(problem, pytrace=False)  # outside of the handler, so that it has no context

    def _check_ranks(self, asked: int) -> None:
        """Skip or fail a test that requests another number of ranks than this run has."""
        selector = self._parts.selector
        if selector.world is not None:
            if asked != selector.world.size:
                _skip(f"is for {asked} ranks, and {selector.world.size} have been started")
            return
        try:
            real = selector.measured_device()
        except DeviceError:
            return  # reported when the device is chosen
        count = device_count()
        # One dry device stands for one of the ranks; with a device for each, each is a process.
        # This is already the process of the only rank of ranks=1: a world of one counts as none.
        alone = asked == 1 and not self._parts.settings.share
        if real is None or alone or (selector.only_model and count < asked):
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

    def _select(
        self, model: str | None, computed: ValueLevel, requested: RequestedRank | None
    ) -> Device:
        if self._parts.settings.sim_values == "always":
            computed = ValueLevel.ALL
        try:
            return self._parts.selector.select(model, computed=computed, requested=requested)
        except DeviceError as error:
            problem = str(error)
        if problem in self._problems:
            problem = "there is no device to measure on, as the first test says"
        self._problems.add(problem)
        pytest.fail(problem, pytrace=False)

    def _quota(self, expectation: Expectation | None, device: Device) -> int | None:
        """Return the bytes that this process may reserve during the test, ``None`` for no limit."""
        admissions = self._parts.sharing.admissions if self._parts.sharing else None
        if admissions is not None and admissions.quota is not None:
            return admissions.quota
        if expectation is not None and expectation.quota is not None:
            return expectation.quota
        if (quota := self._parts.settings.quota) is None:
            return None
        workers = getattr(self._parts.config, "workerinput", {}).get("workercount", 1)
        return quota.of(device.total_memory, workers)

    def _wants_prediction(self, item: pytest.Item) -> bool:
        expectation = self._parts.expectations.of(item)
        if expectation is None or expectation.predict is None or item.get_closest_marker("skip"):
            return False
        return model_of(item) in (None, *expectation.gpu[:1])


def _skip(reason: str) -> NoReturn:
    # As skipif does, so that the report names the test's line and not this one.
    raise pytest.skip.Exception(reason, _use_item_location=True)
