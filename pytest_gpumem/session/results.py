"""The results of tests, collected in the process that reports.

Every project with the plugin installed pays for this module: rarely used imports are local.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.report.pytest_reports import (
    ATTRIBUTE,
    BROKEN_PLUGINS,
    RESCHEDULED,
    SENTENCE,
    SKIPPED_AT_IMPORT,
    SNIPPET,
    UNSIMULATED,
    without_group,
)
from pytest_gpumem.session.stopwatch import Run, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.options import Settings
    from pytest_gpumem.report.record import TestRecord
    from pytest_gpumem.sharing.learned import Learned
    from pytest_gpumem.sharing.usage import Usage
    from pytest_gpumem.values.environment import Environment

OUTPUT = "gpumem"
"""Key of a pytest-xdist worker's output."""


class Results:
    """The records of all tests, and their outcomes in pytest."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.by_run: dict[Run, TestRecord] = {}
        self.failed: set[Run] = set()
        self.subtest_failed: set[Run] = set()
        self.reruns: set[Run] = set()
        self.existing: set[str] = set()
        self.incomplete: dict[str, str] = {}
        self.notes: list[str] = []
        self.broken_plugins: dict[str, None] = {}
        """Sentences, each once: workers may all find the same."""
        self.unsimulated: dict[str, str] = {}
        self.undescribed: dict[str, str] = {}
        """The undescribed kernel that a test called, by node id."""
        self.snippets: dict[str, str] = {}
        """The snippet that describes a kernel, by kernel: once, however many tests it skips."""
        self.sentences: dict[str, str] = {}
        """Texts of failures that are not due to the tests' own memory."""
        self.skipped_at_import = 0
        self.lines: dict[str, tuple[str, int]] = {}
        """The file and line of each test that has a record, by node id."""
        self.skipped_modules: set[str] = set()
        self.environments: dict[str, set[Environment]] = {}
        """The environments of measurements, by worker of pytest-xdist."""
        self.stopwatch = Stopwatch()
        self.usages: Sequence[Usage] = ()
        """The usage of the devices that tests of the run shared."""
        self.foreseen: Learned | None = None
        """The simulated needs of tests, as far as they were requested."""
        self.shard = ""
        """The sentence on the part of the tests that this run was."""
        self.any_marked = False
        """Whether any collected test is marked."""

    @property
    def records(self) -> list[TestRecord]:
        """The records of completed tests, in the order of completion."""
        return [self.stopwatch.timed(run, record) for run, record in self.by_run.items()]

    def take(self, report: pytest.TestReport) -> None:
        """Take in one report of a test."""
        if hasattr(report, RESCHEDULED):
            return
        nodeid, run = without_group(report.nodeid), self._run_of(report)
        outcome: str = report.outcome
        if outcome == "rerun":  # by pytest-rerunfailures: this attempt does not count
            self.reruns.add(run)
            return
        self.stopwatch.take(run, report)
        self.broken_plugins.update(dict.fromkeys(getattr(report, BROKEN_PLUGINS, ())))
        if getattr(report, SKIPPED_AT_IMPORT, False):
            self.skipped_at_import += 1
        if sentence := getattr(report, UNSIMULATED, None):
            self.unsimulated[nodeid] = sentence
        if found := getattr(report, SNIPPET, None):
            kernel, snippet = found
            self.undescribed[nodeid] = kernel
            self.snippets.setdefault(kernel, snippet)
        if sentence := getattr(report, SENTENCE, None):
            self.sentences[nodeid] = sentence
        if report.failed:
            subtest = hasattr(report, "context")
            (self.subtest_failed if subtest else self.failed).add(run)
        if data := getattr(report, ATTRIBUTE, None):
            from pytest_gpumem.report.record import TestRecord

            record = replace(TestRecord.from_dict(data), nodeid=nodeid)
            self.by_run[run] = record
            self.lines[nodeid] = (report.location[0], (report.location[1] or 0) + 1)
            if worker := getattr(report, "worker_id", None):
                self.environments.setdefault(worker, set()).add(record.environment)
        if report.failed and run in self.by_run and not hasattr(report, "context"):
            # Not yet known when the record was made: a failed subtest, an error of the teardown.
            outcome = "failed" if report.when == "call" else "error"
            self.by_run[run] = replace(self.by_run[run], outcome=outcome)

    def _run_of(self, report: pytest.TestReport) -> Run:
        """Return a report's run of a test: ``--dist each`` has one on each worker."""
        each = self.config.getoption("dist", "no") == "each"
        return without_group(report.nodeid), getattr(report, "worker_id", "") if each else ""

    def collected(self, nodeids: Iterable[str], *, marked: bool) -> None:
        """Take in the ids of all collected tests, and whether any of them is marked."""
        self.existing.update(map(without_group, nodeids))
        self.any_marked |= marked

    def note(self, sentence: str) -> None:
        """Add a sentence for the run's reader."""
        self.notes.append(sentence)

    def not_collected(self, nodeid: str) -> None:
        """Record a collection error: the module's tests may well exist."""
        module = nodeid.partition("::")[0]
        self.incomplete[module] = f"{module} could not be collected"

    def module_skipped(self, nodeid: str) -> None:
        """Count a module that a condition on the device skipped when it was imported."""
        self.skipped_modules.add(nodeid)

    def output(self) -> dict[str, Any]:
        """Return this worker's data for the controller, as builtin types."""
        return {
            OUTPUT: {
                "collected": sorted(self.existing),
                "incomplete": self.incomplete,
                "skipped": sorted(self.skipped_modules),
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

    @property
    def has_notes(self) -> bool:
        """Whether there is something to say beside records."""
        is_off = self.settings.device.kind == "off" and self.any_marked
        skipped = self.skipped_at_import or self.skipped_modules or self.unsimulated
        return bool(is_off or skipped or self.notes or self.broken_plugins or self.shard)

    def failures_told_once(self, reporter: pytest.TerminalReporter) -> AbstractContextManager[None]:
        """Return the context in which pytest writes its summary, with each cause once."""
        if not self.sentences and not any(record.failed for record in self.by_run.values()):
            return nullcontext()
        from pytest_gpumem.report.commands import Command
        from pytest_gpumem.report.failures import failures_of, told_once

        records = {nodeid: record for (nodeid, _), record in self.by_run.items()}
        failures = failures_of(records, self.sentences)
        return told_once(reporter, failures, Command.of(self.config), self.config.get_verbosity())
