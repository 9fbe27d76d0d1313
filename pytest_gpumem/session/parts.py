"""The parts that tests of a process share: settings, devices, results; some made on first use."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.device import DeviceError
from pytest_gpumem.options import settings_from
from pytest_gpumem.session.early import selector_of, world_of_run
from pytest_gpumem.session.expected import Expectations
from pytest_gpumem.session.results import Results

if TYPE_CHECKING:
    from pytest_gpumem.device.device import Device
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.measurement.nvml import NvmlReading
    from pytest_gpumem.session.hooks import Hooks
    from pytest_gpumem.session.isolated import Isolation
    from pytest_gpumem.session.launched import Launched
    from pytest_gpumem.session.predictions import Predictions
    from pytest_gpumem.session.sharing import Sharing

REFUSAL = "gpumem_refusal"
"""Key of a pytest-xdist worker's input, and attribute of its collection's report: the reason why
tests cannot run on the GPU."""

SIZED = pytest.StashKey[str]()
"""The text in the header on the number of workers that ``-n auto`` stands for."""

ISOLATED = "gpumem-isolated-reports"
"""The name of the plugin that marks a process of a single test."""


class Parts:
    """The parts of one process's session."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.settings = settings = settings_from(config)
        self.selector = selector_of(config, settings)
        self.selector.extra = lambda device: self.hooks.environment(device)
        self.results = Results(config, settings)
        self.expectations = Expectations(settings, self.selector)
        self.launched = self._launched()
        self.closing = ExitStack()
        """The contexts that restore the state of the process at its end."""
        self.ambient: Device | None = None
        """The device of unmarked tests; ``None`` for the machine as it is."""

    def _launched(self) -> Launched | None:
        """Return this process's part in a run of several ranks, ``None`` for a single process."""
        world = world_of_run(self.config)
        if world is None or self.selector.off or self.config.getoption("collectonly", False):
            return None
        if self.config.getoption("dist", "no") != "no":
            raise pytest.UsageError(
                "torchrun has started this process as one of several, and -n would start workers "
                "of each: leave -n out"
            )
        from pytest_gpumem.session.launched import Launched

        self.selector.world = world
        return Launched(self.config, world, self.selector)

    @property
    def is_one_of_several(self) -> bool:
        """Whether this process has been started for a single test, or for a single rank."""
        return self.launched is not None or self.config.pluginmanager.hasplugin(ISOLATED)

    @property
    def is_worker(self) -> bool:
        """Whether this process is a worker of pytest-xdist."""
        return hasattr(self.config, "workerinput")

    @property
    def runs_tests(self) -> bool:
        """Whether tests run in this process: not in the controller of pytest-xdist."""
        return self.is_worker or self.config.getoption("dist", "no") == "no"

    @cached_property
    def gpus(self) -> tuple[NvmlReading, ...]:
        """The driver's data on the GPUs, read once: by the process that starts workers for them."""
        from pytest_gpumem.device.host_gpus import host_gpus

        return host_gpus(self.settings.device)

    @cached_property
    def refusal(self) -> str | None:
        """The reason why tests cannot run on the GPUs, ``None`` where they can."""
        if hasattr(self.config, "workerinput"):
            received: str | None = self.config.workerinput.get(REFUSAL)
            return received
        from pytest_gpumem.device.host_gpus import refusal

        workers = 1
        if not self.runs_tests:
            specs = self.config.getoption("tx", [])
            local = [re.fullmatch(r"(?:(\d+)\*)?popen\b.*", spec) for spec in specs]
            workers = max(sum(int(one[1] or 1) for one in local if one), 1)
        return refusal(self.gpus, workers, placed=self.settings.share)

    @cached_property
    def hooks(self) -> Hooks:
        """The hook calls to other plugins."""
        from pytest_gpumem.session.hooks import Hooks

        return Hooks(self.config)

    @cached_property
    def isolation(self) -> Isolation:
        """The runner of tests in processes of their own."""
        from pytest_gpumem.session.isolated import Isolation

        return Isolation(self.config)

    @cached_property
    def predictions(self) -> Predictions:
        """The needs of tests by simulation."""
        from pytest_gpumem.session.predictions import Predictions

        return Predictions(self.config)

    @cached_property
    def sharing(self) -> Sharing | None:
        """The admission of tests to shared devices, ``None`` where devices are not shared."""
        if not self.settings.share:
            return None
        from pytest_gpumem.session.sharing import Sharing

        sharing = Sharing(self.config, self.settings, lambda: self.predictions)
        self.closing.callback(sharing.close)
        return sharing

    def shares(self, item: pytest.Item) -> tuple[Expectation | None, Device] | None:
        """Return the expectation and device of ``item``, ``None`` if it is not measured."""
        if not self.expectations.is_measured(item):
            return None
        try:
            model = self.expectations.models(item)[0]
            device = self.selector.select(model, requested=self.expectations.requested_rank(item))
        except DeviceError:
            return None  # reported where the test begins
        return self.expectations.of(item), device
