"""The results of tests, collected in the process that reports."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.report import pytest_reports as reports

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.options import Settings
    from pytest_gpumem.report.record import TestRecord
    from pytest_gpumem.sharing.learned import Learned
    from pytest_gpumem.sharing.usage import RunUsage
    from pytest_gpumem.values.environment import Environment

OUTPUT = "gpumem"
"""Key of a pytest-xdist worker's output."""


NEIGHBOURS = "gpumem_beside"
"""Attribute of a teardown's report: the number of other tests on its devices while it ran."""

RunKey = tuple[str, str]
"""A test by its id, and the worker where several run all of them."""


class Results:
    """The records of all tests, and their outcomes in pytest."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.by_run: dict[RunKey, TestRecord] = {}
        self.failed: set[RunKey] = set()
        self.subtest_failed: set[RunKey] = set()
        self.reruns: set[RunKey] = set()
        self.existing: set[str] = set()
        self.incomplete: dict[str, str] = {}
        self.notes: list[str] = []
        self.broken_plugins: dict[str, None] = {}
        """Sentences without duplicates: several workers may send the same."""
        self.unsimulated: dict[str, str] = {}
        self.undescribed: dict[str, str] = {}
        """The undescribed kernel that a test called, by node id."""
        self.sentences: dict[str, str] = {}
        """Texts of failures that another process or the device caused."""
        self.skipped_at_import = 0
        self.failed_without_gpu: set[RunKey] = set()
        self.lines: dict[str, tuple[str, int]] = {}
        """The file and line of each test that has a record, by node id."""
        self.skipped_modules: set[str] = set()
        self.failed_modules: set[str] = set()
        """Modules whose import failed because there is no GPU."""
        self.environments: dict[str, set[Environment]] = {}
        """The environments of measurements, by worker of pytest-xdist."""
        self.stopwatch = Stopwatch()
        self.usages: Sequence[RunUsage] = ()
        self.foreseen: Learned | None = None
        """The simulated needs of tests for which they were requested."""
        self.shard = ""
        """The sentence on this run's shard of the tests."""
        self.any_marked = False

    @property
    def records(self) -> list[TestRecord]:
        """The records of completed tests, in the order of completion."""
        return [self.stopwatch.timed(run, record) for run, record in self.by_run.items()]

    def take(self, report: pytest.TestReport) -> None:
        """Take in one report of a test."""
        if hasattr(report, reports.RESCHEDULED):
            return
        nodeid = reports.without_group(report.nodeid)
        each = self.config.getoption("dist", "no") == "each"  # on each worker, one run of a test
        run = nodeid, getattr(report, "worker_id", "") if each else ""
        outcome: str = report.outcome
        if outcome == "rerun":  # by pytest-rerunfailures: this attempt does not count
            self.reruns.add(run)
            return
        self.stopwatch.take(run, report)
        self.broken_plugins.update(dict.fromkeys(getattr(report, reports.BROKEN_PLUGINS, ())))
        self.skipped_at_import += getattr(report, reports.SKIPPED_AT_IMPORT, False)
        if hasattr(report, reports.FAILED_WITHOUT_GPU):
            self.failed_without_gpu.add(run)
        for attribute, texts in (
            (reports.UNSIMULATED, self.unsimulated),
            (reports.UNDESCRIBED, self.undescribed),
            (reports.SENTENCE, self.sentences),
        ):
            if text := getattr(report, attribute, None):
                texts[nodeid] = text
        is_subtest = hasattr(report, "context")
        if report.failed:
            (self.subtest_failed if is_subtest else self.failed).add(run)
        if data := getattr(report, reports.ATTRIBUTE, None):
            from pytest_gpumem.report.record import TestRecord

            record = replace(TestRecord.from_dict(data), nodeid=nodeid)
            self.by_run[run] = record
            self.lines[nodeid] = (report.location[0], (report.location[1] or 0) + 1)
            if worker := getattr(report, "worker_id", None):
                self.environments.setdefault(worker, set()).add(record.environment)
        if report.failed and not is_subtest and (known := self.by_run.get(run)) is not None:
            # A failed subtest or an error of the teardown comes after the record was made.
            has_failed = report.when == "call" or known.outcome == "failed"
            self.by_run[run] = replace(known, outcome="failed" if has_failed else "error")

    def collected(self, nodeids: Iterable[str], *, marked: bool) -> None:
        """Take in the ids of all collected tests, and whether any is to be measured."""
        self.existing.update(map(reports.without_group, nodeids))
        self.any_marked |= marked

    def not_collected(self, nodeid: str) -> None:
        """Record a collection error: baselines of the module's tests are not unused."""
        module = nodeid.partition("::")[0]
        self.incomplete[module] = f"{module} could not be collected"

    def output(self) -> dict[str, Any]:
        """Return this worker's data for the controller, as builtin types."""
        return {
            OUTPUT: {
                "collected": sorted(self.existing),
                "incomplete": self.incomplete,
                "skipped": sorted(self.skipped_modules),
                "failed": sorted(self.failed_modules),
                "marked": self.any_marked,
                "shard": self.shard,
            }
        }

    def take_output(self, output: Mapping[str, Any]) -> None:
        """Take in a worker's :meth:`output`."""
        if worker := output.get(OUTPUT):
            self.collected(worker["collected"], marked=worker["marked"])
            self.shard = worker["shard"]
            self.incomplete.update(worker["incomplete"])
            self.skipped_modules.update(worker["skipped"])
            self.failed_modules.update(worker["failed"])

    @property
    def has_notes(self) -> bool:
        """Whether the terminal's section has anything besides records."""
        is_off = self.settings.device.kind == "off" and self.any_marked
        skipped = self.skipped_at_import or self.skipped_modules or self.unsimulated
        failed = self.failed_without_gpu or self.failed_modules
        return bool(is_off or skipped or failed or self.notes or self.broken_plugins or self.shard)

    def failures_shown_once(
        self, reporter: pytest.TerminalReporter
    ) -> AbstractContextManager[None]:
        """Return the context in which pytest's summary shows each cause once."""
        if not self.sentences and not any(record.failed for record in self.by_run.values()):
            return nullcontext()
        from pytest_gpumem.report.failures import Failure, merged

        records = {nodeid: record for (nodeid, _), record in self.by_run.items()}
        failed = {name: Failure(name, one.broken) for name, one in records.items() if one.failed}
        others = {name: Failure(name, (), text) for name, text in self.sentences.items()}
        return merged(reporter, failed | others)


class Stopwatch:
    """The durations of tests, and the number of tests beside them."""

    def __init__(self) -> None:
        self._seconds: dict[RunKey, float] = {}
        self._neighbours: dict[RunKey, int] = {}
        self._workers: set[str] = set()
        self._passed: set[RunKey] = set()

    def take(self, run: RunKey, report: pytest.TestReport) -> None:
        """Take in one report of a test; if it runs again the last attempt counts."""
        if hasattr(report, "context"):
            return  # a subtest's time is its test's
        if report.when == "setup":
            self._seconds[run] = 0.0
            self._passed.discard(run)
            self._workers.add(getattr(report, "worker_id", ""))
        self._seconds[run] = self._seconds.get(run, 0.0) + report.duration
        if report.when == "call" and report.passed:
            self._passed.add(run)
        elif not report.passed:
            self._passed.discard(run)
        if report.when == "teardown" and hasattr(report, NEIGHBOURS):
            self._neighbours[run] = getattr(report, NEIGHBOURS)

    def timed(self, run: RunKey, record: TestRecord) -> TestRecord:
        """Return ``record`` with the test's duration, and the number of tests beside it."""
        if run not in self._seconds:
            return record
        duration = round(self._seconds[run], 6)
        return replace(record, duration=duration, beside=self._neighbours.get(run))

    def costs(self, records: Mapping[RunKey, TestRecord]) -> Learned:
        """Return the costs of passed tests, to be kept; ``records`` are those of measured tests."""
        from pytest_gpumem.sharing.learned import NO_DEVICE, Learned, TestCost

        learned = Learned()
        for run in self._passed:
            record = records.get(run)
            seconds = round(self._seconds[run], 3)
            if record is None:
                learned.learn(NO_DEVICE, run[0], TestCost(seconds=seconds))
            elif (measured := record.measurement) is not None:
                own = seconds if self._was_alone(run, record) else None
                reserved = max(measured.peak_reserved, measured.peak_allocated, 0)
                others = [int(one.device.partition(":")[2] or 0) for one in record.other_devices]
                cost = TestCost(own, reserved, devices=1 + max(others, default=0))
                learned.learn(record.environment.key, run[0], cost)
        return learned

    def _was_alone(self, run: RunKey, record: TestRecord) -> bool:
        """Return whether no other process is known to have used the test's device."""
        beside = self._neighbours.get(run)
        if beside is not None or record.environment.is_exact:
            return not beside
        # Workers without a shared gate may have run tests at the same time.
        return len(self._workers) < 2 and (record.nvml or {}).get("alone") is not False
