"""The session of one pytest process: what it starts, hands to its tests, and writes at its end."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.device import DeviceError
from pytest_gpumem.device.host_gpus import describe
from pytest_gpumem.paths import relative
from pytest_gpumem.report.pytest_reports import HARMLESS, LOST, RESCHEDULED
from pytest_gpumem.session.context import REFUSAL, SIZED, Parts, begin, current_ambient
from pytest_gpumem.session.expected import MARKER_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.session.conclusion import Conclusion
    from pytest_gpumem.session.fixture import Gpumem
    from pytest_gpumem.session.hosts import Hosts
    from pytest_gpumem.session.lifecycle import TestLifecycle
    from pytest_gpumem.session.shard import Sharding
    from pytest_gpumem.sharing.usage import RunUsage
    from pytest_gpumem.sharing.weights import Weights


class GpumemSession(Parts):
    """The plugin's state in one process, which may be a pytest-xdist worker or controller."""

    lifecycle: TestLifecycle | None = None
    """The lifecycle of this process's tests; ``None`` while none of them is measured."""

    def start(self) -> None:
        """Activate the simulated GPU, where the options require it."""
        if self.launched is not None:
            self.launched.keep_output()
            self.config.add_cleanup(self.launched.end)
        if self.settings.sim_scope != "session" or self.selector.off or not self.runs_tests:
            return
        early = current_ambient(self.config)
        if early is None:
            try:
                early = begin(self.config, self.settings, self.selector)
            except DeviceError as error:
                raise pytest.UsageError(str(error)) from None
        self.ambient = early.device

    def stop(self) -> None:
        """Restore the state of the process, also where a test was interrupted."""
        if self.lifecycle is not None:
            self.lifecycle.end()
        if ambient := current_ambient(self.config):
            ambient.resources.close()

    def header(self) -> str:
        """Return the header line with the devices that tests are measured on."""
        from pytest_gpumem.report.header import header_line, installed_release

        root = self.settings.baselines
        folders: list[str] = []
        with suppress(OSError):  # an unreadable folder is reported where a baseline is needed
            folders += sorted(path.name for path in root.glob("[!.]*") if path.is_dir())
        shown = relative(root, self.config.rootpath)
        launched = self.launched
        ranks = [] if launched is None else [f"{launched.world.size} ranks, a process each"]
        sized = self.config.stash.get(SIZED, None)
        clauses = [*ranks, *describe(self.gpus), *([sized] if sized else [])]
        return header_line(
            self.selector.description, installed_release("torch"), shown, folders, clauses
        )

    def collected(self, items: Sequence[pytest.Item]) -> None:
        """Record the collected tests."""
        measures = self.expectations.measures_unmarked
        marked = any(
            item.get_closest_marker(MARKER_NAME) or measures(getattr(item, "fixturenames", ()))
            for item in items
        )
        self.results.collected([item.nodeid for item in items], marked=marked)

    def finish(self, session: pytest.Session) -> None:
        """Write baselines and reports, in the process that has all results."""
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput.update(self.results.output())
            return
        if self.config.getoption("collectonly", False):
            return
        if self.settings.all and not self.selector.off and not self.expectations.torch_is_there:
            self.results.notes.append(
                "--gpumem-all measured no test, because torch is not installed"
            )
        if self.sharing is not None:
            self.results.usages = self.controller.usages() or self.sharing.usages()
            self.results.foreseen = self.controller.hosts.learned
        writes = self._writes and (self.launched is None or self.launched.writes_output)
        fails = writes and not self.conclusion.finish(session.exitstatus)
        if fails and session.exitstatus in HARMLESS:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.launched is not None:
            self.launched.finish(session, self.results)

    def summarize(self) -> None:
        """Write the terminal's section, where there is something to say."""
        if self._writes or self.results.has_notes:
            self.conclusion.summarize()

    @property
    def _writes(self) -> bool:
        """Whether files are written at the end, or may have to be."""
        settings = self.settings
        asked = any(not target.unasked for target in settings.reports)
        changes = settings.update_baselines or settings.prune_baselines
        return bool(self.results.by_run or asked or changes or settings.share or settings.shard)

    def fixture(self) -> Gpumem:
        """Return the value of the ``gpumem`` fixture for the current test."""
        from pytest_gpumem.session.fixture import Gpumem

        run = self.lifecycle.current if self.lifecycle else None
        return Gpumem(run, off=self.selector.off)

    def lifecycle_of(self, item: pytest.Item) -> TestLifecycle | None:
        """Return the lifecycle of tests, ``None`` until a test needs it: one like ``item``."""
        if self.lifecycle is None and (
            self.results.any_marked
            or self.ambient is not None
            or item.get_closest_marker(MARKER_NAME)
            or self.expectations.is_measured(item)
        ):
            from pytest_gpumem.session.lifecycle import TestLifecycle

            self.lifecycle = TestLifecycle(self)
        return self.lifecycle

    @cached_property
    def conclusion(self) -> Conclusion:
        """The reports and baselines that are written at the end."""
        from pytest_gpumem.session.conclusion import Conclusion

        return Conclusion(self.results)

    @cached_property
    def controller(self) -> Controller:
        """The data on the pytest-xdist workers that this process has started."""
        return Controller(self)

    @cached_property
    def sharding(self) -> Sharding | None:
        """The deselection of other machines' tests, ``None`` without ``--gpumem-shard``."""
        if self.settings.shard is None:
            return None
        from pytest_gpumem.session.shard import Sharding

        return Sharding(self.results, self.expectations.of)


class Controller:
    """The data on workers of pytest-xdist that this process has started."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._run_id = ""
        """The run's id in its workers; known when they start."""
        self._lost: dict[str, str] = {}
        """The test in which the CUDA context was lost, by worker."""

    @cached_property
    def hosts(self) -> Hosts:
        """The messages of workers on their devices."""
        from pytest_gpumem.session.hosts import Hosts

        return Hosts(self._parts.config)

    def send_input(self, node: Any, weights: Weights | None) -> None:
        """Send this process's data to a worker, which may be on another host."""
        self._run_id = node.workerinput["testrunuid"]
        if node.gateway.spec.popen:  # a worker of this host
            node.workerinput[REFUSAL] = self._parts.why_not
        if weights is None and not self._parts.settings.share:
            return
        from pytest_gpumem.sharing.learned import INPUT, WEIGHTS, learned_before

        if weights is not None:
            node.workerinput[WEIGHTS] = weights.to_dict()
        if self._parts.settings.share:
            self.hosts.connect(node)
            node.workerinput[INPUT] = learned_before(self._parts.config).to_dict()

    def scheduler(self, config: pytest.Config, log: Any) -> object | None:
        """Return the scheduler of tests to workers, ``None`` for pytest-xdist's own."""
        if not self._parts.settings.share or config.getoption("dist", "no") != "load":
            return None
        from pytest_gpumem.sharing.order import MemoryScheduling

        return MemoryScheduling(config, log, self.hosts.place_of)

    def usages(self) -> list[RunUsage]:
        """Return the usage of each host's devices; none where there are no workers."""
        return self.hosts.usages(self._run_id) if self._run_id else []

    def take(self, report: Any) -> None:
        """Record that a worker has lost its CUDA context."""
        if (lost := getattr(report, LOST, None)) and (worker := _worker_of(report)):
            self._lost[worker] = lost

    def reschedule(self, nodeid: str, report: Any, scheduler: Any) -> None:
        """Reschedule ``nodeid`` if its worker exited because it lost the CUDA context."""
        culprit = self._lost.get(_worker_of(report) or "")
        if self._parts.settings.share and nodeid in self.hosts.suspects:
            why = "a fault of the GPU hit all that ran on it: it is run again by itself"
        elif culprit is not None:
            why = f"its worker lost the CUDA context in {culprit}: another worker runs it"
        else:
            return
        try:
            scheduler.mark_test_pending(nodeid)
        except NotImplementedError:
            report.longrepr = f"{nodeid} was not run: {why.partition(':')[0]}; run it again"
            return
        report.outcome = "rerun"
        report.longrepr = why
        setattr(report, RESCHEDULED, why)


def _worker_of(report: Any) -> str | None:
    """Return the worker that a report comes from; ``None`` for one of this process."""
    node = getattr(report, "node", None)
    return None if node is None else node.gateway.id
