"""The parts of a session, each imported and made when it is first used."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.session.early import world_of_run
from pytest_gpumem.session.expected import Expectations
from pytest_gpumem.session.results import Results

if TYPE_CHECKING:
    from pytest_gpumem.device.select import DeviceSelector
    from pytest_gpumem.options import Settings
    from pytest_gpumem.session.affinity import FixtureDevices
    from pytest_gpumem.session.hooks import Hooks
    from pytest_gpumem.session.host import Host
    from pytest_gpumem.session.hosts import Hosts
    from pytest_gpumem.session.isolated import Isolation
    from pytest_gpumem.session.launched import Launched
    from pytest_gpumem.session.measuring import Measuring
    from pytest_gpumem.session.predictions import Predictions
    from pytest_gpumem.session.shard import Sharding
    from pytest_gpumem.session.sharing import Sharing
    from pytest_gpumem.session.watched import Watched


class Parts:
    """The parts of a session; ``results`` and expectations are made in every session."""

    def __init__(self, config: pytest.Config, settings: Settings, selector: DeviceSelector) -> None:
        self._config = config
        self.settings = settings
        self.selector = selector
        self.selector.extra = lambda device: self.hooks.environment(device)
        self.results = Results(config, settings)
        self._expectations = Expectations(settings, lambda: self.selector)
        self.launched = self._launched()

    def _launched(self) -> Launched | None:
        """Return this process's part in a run of several ranks, ``None`` for a single process."""
        world = world_of_run(self._config)
        if world is None or self.selector.off or self._config.getoption("collectonly", False):
            return None
        if self._config.getoption("dist", "no") != "no":
            raise pytest.UsageError(
                "torchrun has started this process as one of several, and -n would start workers "
                "of each: leave -n out"
            )
        from pytest_gpumem.session.launched import Launched

        self.selector.world = world
        return Launched(self._config, world, self.selector)

    @cached_property
    def fixture_devices(self) -> FixtureDevices:
        """The record of the devices that shared fixtures were set up on."""
        from pytest_gpumem.session.affinity import FixtureDevices

        return FixtureDevices()

    @cached_property
    def hooks(self) -> Hooks:
        """The hook calls to other plugins."""
        from pytest_gpumem.session.hooks import Hooks

        return Hooks(self._config)

    @cached_property
    def sharding(self) -> Sharding | None:
        """The deselection of other machines' tests, ``None`` without ``--gpumem-shard``."""
        if self.settings.shard is None:
            return None
        from pytest_gpumem.session.shard import Sharding

        return Sharding(self._config, self.settings, self.results, self._expectations.of)

    @cached_property
    def predictions(self) -> Predictions:
        """The needs of tests by simulation."""
        from pytest_gpumem.session.predictions import Predictions

        return Predictions(self._config)

    @cached_property
    def host(self) -> Host:
        """The GPUs of this host, and whether as many processes as there are can use them."""
        from pytest_gpumem.session.host import Host

        return Host(self._config, self.settings)

    @property
    def described(self) -> list[str]:
        """The header's clauses on processes and GPUs."""
        launched = self.launched
        ranks = [] if launched is None else [f"{launched.world.size} ranks, a process each"]
        return [*ranks, *self.host.described]

    @cached_property
    def sharing(self) -> Sharing:
        """The admission of tests to shared devices."""
        from pytest_gpumem.session.sharing import Sharing

        return Sharing(self._config, self.settings, lambda: self.predictions)

    @cached_property
    def _isolation(self) -> Isolation:
        """The runner of tests in processes of their own."""
        from pytest_gpumem.session.isolated import Isolation

        return Isolation(self._config)

    @cached_property
    def hosts(self) -> Hosts:
        """The messages of pytest-xdist workers on their devices."""
        from pytest_gpumem.session.hosts import Hosts

        return Hosts()

    @cached_property
    def watched(self) -> Watched:
        """The publisher of this process's tests to watchers."""
        from pytest_gpumem.session.watched import Watched

        return Watched(self._config)

    @cached_property
    def measuring(self) -> Measuring:
        """The starter of measurements."""
        from pytest_gpumem.session.measuring import Measuring

        return Measuring(
            self._config,
            self.settings,
            self.selector,
            self._expectations,
            lambda: self.predictions,
            self.sharing if self.settings.share else None,
            self.hooks,
        )


def runs_tests(config: pytest.Config) -> bool:
    """Return whether tests run in this process: not in the controller of pytest-xdist."""
    return hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
