"""The process that has started workers of pytest-xdist: the data that it sends and receives."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.report.pytest_reports import LOST, RESCHEDULED
from pytest_gpumem.session.parts import REFUSAL, Parts

if TYPE_CHECKING:
    from pytest_gpumem.session.hosts import Hosts
    from pytest_gpumem.sharing.usage import Usage
    from pytest_gpumem.sharing.weights import Weights


class Controller:
    """The data on the workers of a run."""

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
            node.workerinput[REFUSAL] = self._parts.refusal
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

    def usages(self) -> list[Usage]:
        """Return the usage of each host's devices; none where there are no workers."""
        return self.hosts.usages(self._run_id) if self._run_id else []

    def take(self, report: Any) -> None:
        """Record that a worker has lost its CUDA context."""
        if (lost := getattr(report, LOST, None)) and (worker := _worker_of(report)):
            self._lost[worker] = lost

    def reschedule(self, nodeid: str, report: Any, scheduler: Any) -> None:
        """Reschedule the next test of a worker that left on purpose; leave real crashes."""
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
