"""The parts that tests of a process share: settings, devices, results; some made on first use.

The process's device is chosen before the first conftest is imported, because a conftest may store
``torch_device = "cuda" if torch.cuda.is_available() else "cpu"``. With
``--gpumem-sim-scope=session`` that device is the simulated GPU.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pytest_gpumem.cached_answers import watch
from pytest_gpumem.device import DeviceError, ValueLevel
from pytest_gpumem.device.host_gpus import REFUSED, TRIED, has_driver, host_gpus, why_not_usable
from pytest_gpumem.device.select import SELECTOR, DeviceSelector
from pytest_gpumem.options import settings_from
from pytest_gpumem.session.expected import Expectations
from pytest_gpumem.session.results import Results

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.device.device import Device
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.measurement.nvml import NvmlReading
    from pytest_gpumem.options import Settings
    from pytest_gpumem.session.hooks import Hooks
    from pytest_gpumem.session.launched import TorchrunRank
    from pytest_gpumem.session.predictions import Predictions
    from pytest_gpumem.session.sharing import Sharing
    from pytest_gpumem.values.world import World

REFUSAL = "gpumem_refusal"
"""Key of a pytest-xdist worker's input, and attribute of its collection's report: the reason why
tests cannot run on the GPU."""

SIZED = pytest.StashKey[str]()
"""The text in the header on the number of workers that ``-n auto`` stands for."""

ISOLATED = "gpumem-isolated-reports"
"""The name of the plugin that marks a process of a single test."""


class Ambient(NamedTuple):
    """The device for code outside measured tests, active until its resources are closed."""

    selector: DeviceSelector
    device: Device
    variables: Mapping[str, str]
    resources: ExitStack


AMBIENT = pytest.StashKey[Ambient]()


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
        self.ambient: Device | None = None
        """The device of unmarked tests; ``None`` for the machine as it is."""

    def _launched(self) -> TorchrunRank | None:
        """Return this process's rank in a run by torchrun, ``None`` for a single process."""
        world = world_of_run(self.config)
        if world is None or self.selector.off or self.config.getoption("collectonly", False):
            return None
        if self.config.getoption("dist", "no") != "no":
            raise pytest.UsageError(
                "torchrun has started this process as one of several, and -n would start workers "
                "of each: leave -n out"
            )
        from pytest_gpumem.session.launched import TorchrunRank

        self.selector.world = world
        return TorchrunRank(self.config, world, self.selector)

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
        """NVML's readings of the GPUs, made once, in the process that starts the workers."""
        return host_gpus(self.settings.device)

    @cached_property
    def why_not(self) -> str | None:
        """The reason why tests cannot run on the GPUs, ``None`` where they can."""
        if hasattr(self.config, "workerinput"):
            received: str | None = self.config.workerinput.get(REFUSAL)
            return received
        workers = 1
        if not self.runs_tests:
            specs = self.config.getoption("tx", [])
            local = [re.fullmatch(r"(?:(\d+)\*)?popen\b.*", spec) for spec in specs]
            workers = max(sum(int(one[1] or 1) for one in local if one), 1)
        return why_not_usable(self.gpus, workers, placed=self.settings.share)

    @cached_property
    def hooks(self) -> Hooks:
        """The hook calls to other plugins."""
        from pytest_gpumem.session.hooks import Hooks

        return Hooks(self.config)

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
        self.config.add_cleanup(sharing.close)
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


def begin_early(config: pytest.Config) -> None:
    """Choose the process's device, and activate a simulated one, where the options require it."""
    options = config.known_args_namespace
    is_started = SELECTOR in config.stash or "PYTEST_XDIST_WORKER" in os.environ
    if not is_started and (options.help or options.version):
        return
    workers = getattr(options, "numprocesses", None) or getattr(options, "tx", None)
    controls = bool(workers) or getattr(options, "dist", "no") != "no"
    runs_tests = is_started or not controls
    try:
        settings = settings_from(config, options)
    except pytest.UsageError:
        return  # reported when pytest configures itself
    if settings.device.kind == "dry" and not _begin_dry(config, settings, controls=not runs_tests):
        settings = settings_from(config, options)  # auto is a simulated device then
    if not runs_tests:
        return
    # Dynamo follows torch's functions as they were when it was imported.
    is_simulated = settings.device.kind in ("auto", "sim") and not has_driver()
    if is_simulated and "torch._dynamo" not in sys.modules:
        watch()
    if settings.share or settings.quota is not None:
        from pytest_gpumem.session.placement import place

        config.add_cleanup(place(settings))
    is_requested = settings.sim_scope == "session" or SELECTOR in config.stash
    if not is_requested or settings.device.kind == "off":
        return

    selector = selector_of(config, settings)
    with suppress(pytest.UsageError):  # reported when pytest configures itself
        selector.world = world_of_run(config)
    with suppress(DeviceError):
        # A real device exists anyway: making it the current one can wait for the conftests.
        if selector.measured_device() is None:
            begin(config, settings, selector)


def _begin_dry(config: pytest.Config, settings: Settings, *, controls: bool) -> bool:
    """Start the dry device; return ``False`` where ``auto`` chose it and it cannot start."""
    from pytest_gpumem.dry.start import begin_process

    try:
        begin_process(config, settings, controls=controls)
    except pytest.UsageError as error:
        if not settings.device.of_auto:
            raise
        os.environ[REFUSED] = f"{TRIED}{error}"
        return False
    return True


def current_ambient(config: pytest.Config) -> Ambient | None:
    """Return the active device, ``None`` if a conftest has since changed a variable it reads."""
    ambient = config.stash.get(AMBIENT, None)
    if ambient is None or ambient.variables == _variables():  # a conftest may have set some
        return ambient
    ambient.resources.close()
    del config.stash[AMBIENT]
    return None


def selector_of(config: pytest.Config, settings: Settings) -> DeviceSelector:
    """Return the selector of the process's devices: another plugin's, else one by the settings."""
    if ambient := current_ambient(config):
        return ambient.selector
    selector = config.stash.get(SELECTOR, None) or DeviceSelector(settings.device)
    selector.stand_ins = settings.sim_stand_ins != "off"
    selector.compile = settings.sim_compile
    selector.runs_again = settings.sim_values == "auto"
    return selector


def begin(config: pytest.Config, settings: Settings, selector: DeviceSelector) -> Ambient:
    """Activate the ambient device until pytest is unconfigured; raises ``DeviceError``."""
    computed = ValueLevel.ALL if settings.sim_values == "always" else ValueLevel.AT_FIRST
    device = selector.select(None, computed=computed, requested=selector.launched_rank)
    ambient = config.stash[AMBIENT] = Ambient(selector, device, _variables(), ExitStack())
    config.add_cleanup(ambient.resources.close)
    ambient.resources.enter_context(device.active())
    return ambient


def world_of_run(config: pytest.Config) -> World | None:
    """Return the rank that torchrun has started this process as, ``None`` for any other."""
    if "WORLD_SIZE" not in os.environ or SELECTOR in config.stash:
        return None  # a process that makes predictions is no rank
    from pytest_gpumem.values.world import WorldError, world_of_process

    try:
        return world_of_process(os.environ)
    except WorldError as error:
        raise pytest.UsageError(str(error)) from None


def _variables() -> dict[str, str]:
    """Return the environment variables that a device reads when it is made."""
    prefixes = "PYTORCH_", "CUBLAS", "TORCH_"
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
