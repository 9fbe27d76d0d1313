"""A plugin for a process of its own: it runs tests on simulated GPUs and writes their numbers.

The process is pytest with the arguments of the calling one, so that its conftest files, ini file,
options and plugins apply. Whatever must not happen twice is switched off: reports, caches,
baselines, workers, debuggers.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.device.select import SELECTOR, DeviceSelector
from pytest_gpumem.option_values import DeviceChoice
from pytest_gpumem.report.pytest_reports import ATTRIBUTE
from pytest_gpumem.simulated.gpu.catalogue import Machine
from pytest_gpumem.values.serialization import Plain

if TYPE_CHECKING:
    from pytest_gpumem.device.device import Device
    from pytest_gpumem.values.world import RequestedRank

REQUEST = "PYTEST_GPUMEM_REQUEST"
"""The environment variable with the path of a :class:`Request`; the answer is written beside it."""
ANSWER = "answer.json"

UNBOUNDED = 1 << 50
"""Memory of a device on which everything fits, to see how much a program would need."""

RAN_OUT = "it runs out of memory"
"""The problem of a test that ran out of memory."""

_OPTIONS: dict[str, Any] = {
    "gpumem_all": True,
    "gpumem_sim_scope": "session",  # a real GPU exists while modules are imported, too
    "gpumem_report": ["off"],
    "dist": "no",
    "maxfail": 0,
    "log_file": os.devnull,
    **dict.fromkeys(("gpumem_update_baselines", "gpumem_prune_baselines", "gpumem_artifacts")),
    **dict.fromkeys(("gpumem_share", "gpumem_shard", "numprocesses")),
    **dict.fromkeys(("xmlpath", "report_log", "htmlpath")),
    **dict.fromkeys(("usepdb", "trace", "lf", "failedfirst", "newfirst", "stepwise"), False),
}
"""Options of pytest and well-known plugins, by their names in ``config.option``."""

INI = (
    *("gpumem_prune_baselines=false", "gpumem_share=false", "gpumem_update_baselines="),
    *("gpumem_report=", "gpumem_shard=", "gpumem_artifacts="),
)
"""Settings of the ini file that are overridden, as values of ``-o``."""


@dataclass(frozen=True)
class Request(Plain):
    """The request to the process."""

    tests: tuple[str, ...]
    """Node ids, or paths in front of ``::`` that are absolute."""
    machines: tuple[Machine, ...]
    unbounded: bool = False
    """Whether a test that runs out of memory runs again with unlimited memory."""
    options: dict[str, Any] | None = None
    """Further values of ``config.option``."""
    seconds: float | None = None
    """Seconds after which no other test begins."""
    modules_compiled: bool = False
    """Whether the modules that tests call are compiled."""
    dry: bool = False
    """Whether the process has a dry device, which is its only machine."""


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Choose the machine before the plugin needs one."""
    early_config.stash[SELECTOR] = Simulations(Request.from_file(Path(os.environ[REQUEST])))
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Replace the command line's options on tests, workers and reports."""
    selector = config.stash[SELECTOR]
    assert isinstance(selector, Simulations)
    request, own = selector.request, Path(os.environ[REQUEST]).parent
    options = {**_OPTIONS, "basetemp": str(own / "tmp"), **(request.options or {})}
    for name, value in options.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.args = list(request.tests)
    config.pluginmanager.register(_Runs(selector, own / ANSWER), "gpumem-prediction")


class Simulations(DeviceSelector):
    """The choice of the present run's machine, whatever the options are."""

    def __init__(self, request: Request) -> None:
        self.request, self.machine = request, request.machines[0]
        super().__init__(DeviceChoice("auto", models=(self.machine.model.name,)))

    def measured_device(
        self, computed: ValueLevel = ValueLevel.AT_FIRST, requested: RequestedRank | None = None
    ) -> None:
        """Return nothing: no test is measured."""

    def select(
        self,
        model: str | None,
        *,
        computed: ValueLevel = ValueLevel.AT_FIRST,
        requested: RequestedRank | None = None,
    ) -> Device:
        """Return the device of the present machine."""
        if self.request.dry:
            return self._dry(computed, requested)
        self.check_torch()
        return self._simulate(self.machine, computed, requested)


class _Runs:
    """A plugin that runs all tests on each machine."""

    def __init__(self, selector: Simulations, answer: Path) -> None:
        self._request = request = selector.request
        self._selector = selector
        self._answer = answer
        self._answers: list[dict[str, Any]] = []
        self._present: dict[str, dict[str, Any]] = {}
        self._short: set[str] = set()
        """Tests that ran out of memory."""
        self._end = math.inf if request.seconds is None else time.monotonic() + request.seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests; other plugins' hooks here are for one run on one machine."""
        if session.testsfailed:
            return None
        compiled: AbstractContextManager[None] = nullcontext()
        if self._request.modules_compiled:
            from pytest_gpumem.prediction.compiled import modules_compiled  # imports torch

            compiled = modules_compiled()
        with compiled:
            for machine in self._request.machines:
                found = self._run(session.items, machine)
                short = [item for item in session.items if item.nodeid in self._short]
                if short and self._request.unbounded:
                    large = replace(machine.model, total_memory=UNBOUNDED)
                    again = self._run(short, Machine(large, machine.count))
                    found.update((name, {**one, "fits": False}) for name, one in again.items())
                self._answers += found.values()
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record tests that ran out of memory; unittest's failures are known by now, too."""
        import torch

        report = yield
        if call.excinfo is not None and call.excinfo.errisinstance(torch.OutOfMemoryError):
            self._short.add(item.nodeid)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        empty = {"nodeid": report.nodeid, "record": None, "fits": True, "problem": ""}
        answer = self._present.setdefault(report.nodeid, empty)
        if record := getattr(report, ATTRIBUTE, None):
            answer["record"] = record
        if not report.passed and not answer["problem"]:
            answer["problem"] = RAN_OUT if report.nodeid in self._short else _problem(report)

    def pytest_sessionfinish(self) -> None:
        self._answer.write_text(json.dumps(self._answers), encoding="utf-8")

    def _run(self, items: list[pytest.Item], machine: Machine) -> dict[str, dict[str, Any]]:
        self._selector.machine = machine
        self._present, self._short = {}, set()
        # After the last test everything is torn down: the next machine has fixtures of its own.
        for item, following in zip(items, [*items[1:], None], strict=True):
            if time.monotonic() > self._end:
                break
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        gpu = machine.model.name
        return {nodeid: {**answer, "gpu": gpu} for nodeid, answer in self._present.items()}


def _problem(report: pytest.TestReport) -> str:
    """Return in one line why a test was skipped or failed."""
    longrepr: Any = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return next(filter(None, map(str.strip, text.splitlines())), report.outcome)
