"""The process's device, chosen before the first conftest is imported.

With ``--gpumem-sim-scope=session`` it is the simulated GPU, because conftests decide for good:
``torch_device = "cuda" if torch.cuda.is_available() else "cpu"``.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pytest_gpumem.cached_answers import watch
from pytest_gpumem.device import Computed, DeviceError
from pytest_gpumem.device.host_gpus import REFUSED, has_driver
from pytest_gpumem.device.select import SELECTOR, DeviceSelector
from pytest_gpumem.options import settings_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.device.device import Device
    from pytest_gpumem.options import Settings
    from pytest_gpumem.values.world import World

_OF_TORCH = ("PYTORCH_", "CUBLAS", "TORCH_")
"""Prefixes of variables that a device reads when it is made."""


class Ambient(NamedTuple):
    """The device of code that is not measured, active until its resources are closed."""

    selector: DeviceSelector
    device: Device
    variables: Mapping[str, str]
    resources: ExitStack


AMBIENT = pytest.StashKey[Ambient]()


def begin_early(config: pytest.Config) -> None:
    """Choose the process's device, and activate a simulated one, where the options require it."""
    options = config.known_args_namespace
    is_started = SELECTOR in config.stash or "PYTEST_XDIST_WORKER" in os.environ
    if not is_started and (options.help or options.version):
        return
    workers = getattr(options, "numprocesses", None) or getattr(options, "tx", None)
    controls = bool(workers) or getattr(options, "dist", "no") != "no"
    will_run_tests = is_started or not controls
    try:
        settings = settings_from(config, options)
    except pytest.UsageError:
        return  # reported when pytest configures itself
    if settings.device.kind == "dry" and not _begin_dry(
        config, settings, controls=not will_run_tests
    ):
        settings = settings_from(config, options)  # auto is a simulated device then
    if not will_run_tests:
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
        if selector.real() is None:
            begin(config, settings, selector)


def _begin_dry(config: pytest.Config, settings: Settings, *, controls: bool) -> bool:
    """Give this process the dry device; return ``False`` where ``auto`` chose it in vain."""
    from pytest_gpumem.dry.start import begin_process
    from pytest_gpumem.sharing.database import default_folder

    try:
        begin_process(
            ",".join(settings.device.models),
            config.pluginmanager.getplugin("capturemanager"),
            everywhere=settings.sim_scope == "session",
            shared=default_folder() if settings.share else None,
            controls=controls,
        )
    except pytest.UsageError as error:
        if not settings.device.of_auto:
            raise
        os.environ[REFUSED] = str(error)
        return False
    return True


def current_ambient(config: pytest.Config) -> Ambient | None:
    """Return the device that exists already, ``None`` where it would not be the same now."""
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
    return selector


def begin(config: pytest.Config, settings: Settings, selector: DeviceSelector) -> Ambient:
    """Activate the ambient device until pytest is unconfigured; raises ``DeviceError``."""
    computed = Computed.ALL if settings.sim_values == "always" else Computed.AT_FIRST
    device = selector.select(None, computed=computed, requested=selector.launched_rank)
    ambient = config.stash[AMBIENT] = Ambient(selector, device, _variables(), ExitStack())
    config.add_cleanup(ambient.resources.close)
    ambient.resources.enter_context(device.active())
    return ambient


def world_of_run(config: pytest.Config) -> World | None:
    """Return the rank that torchrun has started this process as, ``None`` for any other."""
    if "WORLD_SIZE" not in os.environ or SELECTOR in config.stash:
        return None  # a process that makes predictions is one of its own
    from pytest_gpumem.values.world import WorldError, world_of_process

    try:
        return world_of_process(os.environ)
    except WorldError as error:
        raise pytest.UsageError(str(error)) from None


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_TORCH)}
