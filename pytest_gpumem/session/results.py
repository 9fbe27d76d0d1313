"""The results of tests: collected in the process that reports, written at its end."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.paths import relative
from pytest_gpumem.report.pytest_reports import (
    ATTRIBUTE,
    BROKEN_PLUGINS,
    LOST,
    RESCHEDULED,
    SENTENCE,
    SKIPPED_AT_IMPORT,
    SNIPPET,
    UNSIMULATED,
    without_group,
)
from pytest_gpumem.session.stopwatch import Run, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.baseline.collected import Collected
    from pytest_gpumem.baseline.update import MeasuredTest, UpdateReport
    from pytest_gpumem.options import Settings
    from pytest_gpumem.report.record import TestRecord
    from pytest_gpumem.report.remarks import Missing
    from pytest_gpumem.session.faults import Crashes
    from pytest_gpumem.sharing.learned import Learned
    from pytest_gpumem.sharing.usage import Usage
    from pytest_gpumem.values.environment import Environment

OUTPUT = "gpumem"
"""Key of a pytest-xdist worker's output."""

AT_IMPORT = "there a GPU that is simulated exists only with --gpumem-sim-scope=session"

_COLLECTING = (
    *("python_files", "python_classes", "python_functions", "norecursedirs", "testpaths"),
    *("collect_imported_tests", "consider_namespace_packages"),
)
"""Settings of pytest that determine the collected tests."""


class Results:
    """The records of all tests, and their outcomes in pytest."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._records: dict[Run, TestRecord] = {}
        self._failed: set[Run] = set()
        self._subtest_failed: set[Run] = set()
        self._rerun: set[Run] = set()
        self._collected: set[str] = set()
        self._incomplete: dict[str, str] = {}
        self._notes: list[str] = []
        self._broken_plugins: dict[str, None] = {}
        """Sentences, each once: workers may all find the same."""
        self._unsimulated: dict[str, str] = {}
        self._undescribed: dict[str, str] = {}
        """The undescribed kernel that a test called, by node id."""
        self._snippets: dict[str, str] = {}
        """The snippet that describes a kernel, by kernel: once, however many tests it skips."""
        self._sentences: dict[str, str] = {}
        """Texts of failures that are not due to the tests' own memory."""
        self._skipped_at_import = 0
        self._lines: dict[str, tuple[str, int]] = {}
        """The file and line of each test that has a record, by node id."""
        self._annotations: list[str] = []
        """Lines that the CI system reads from the terminal."""
        self._skipped_modules: set[str] = set()
        self._update: UpdateReport | None = None
        self._environments: dict[str, set[Environment]] = {}
        """The environments of measurements, by worker of pytest-xdist."""
        self._stopwatch = Stopwatch()
        self._missing: Missing | None = None
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
        return [self._stopwatch.timed(run, record) for run, record in self._records.items()]

    @cached_property
    def crashes(self) -> Crashes:
        """The handling of tests whose worker has left."""
        from pytest_gpumem.session.faults import Crashes

        return Crashes()

    def take(self, report: pytest.TestReport) -> None:
        """Take in one report of a test."""
        if hasattr(report, LOST):
            self.crashes.take(report)
        if hasattr(report, RESCHEDULED):
            return
        nodeid, run = without_group(report.nodeid), self._run_of(report)
        outcome: str = report.outcome
        if outcome == "rerun":  # by pytest-rerunfailures: this attempt does not count
            self._rerun.add(run)
            return
        self._stopwatch.take(run, report)
        self._broken_plugins.update(dict.fromkeys(getattr(report, BROKEN_PLUGINS, ())))
        if getattr(report, SKIPPED_AT_IMPORT, False):
            self._skipped_at_import += 1
        if sentence := getattr(report, UNSIMULATED, None):
            self._unsimulated[nodeid] = sentence
        if found := getattr(report, SNIPPET, None):
            kernel, snippet = found
            self._undescribed[nodeid] = kernel
            self._snippets.setdefault(kernel, snippet)
        if sentence := getattr(report, SENTENCE, None):
            self._sentences[nodeid] = sentence
        if report.failed:
            subtest = hasattr(report, "context")
            (self._subtest_failed if subtest else self._failed).add(run)
        if data := getattr(report, ATTRIBUTE, None):
            from pytest_gpumem.report.record import TestRecord

            record = replace(TestRecord.from_dict(data), nodeid=nodeid)
            self._records[run] = record
            self._lines[nodeid] = (report.location[0], (report.location[1] or 0) + 1)
            if worker := getattr(report, "worker_id", None):
                self._environments.setdefault(worker, set()).add(record.environment)
        if report.failed and run in self._records and not hasattr(report, "context"):
            # Not yet known when the record was made: a failed subtest, an error of the teardown.
            outcome = "failed" if report.when == "call" else "error"
            self._records[run] = replace(self._records[run], outcome=outcome)

    def _run_of(self, report: pytest.TestReport) -> Run:
        """Return a report's run of a test: ``--dist each`` has one on each worker."""
        each = self._config.getoption("dist", "no") == "each"
        return without_group(report.nodeid), getattr(report, "worker_id", "") if each else ""

    def collected(self, nodeids: Iterable[str], *, marked: bool) -> None:
        """Take in the ids of all collected tests, and whether any of them is marked."""
        self._collected.update(map(without_group, nodeids))
        self.any_marked |= marked

    def note(self, sentence: str) -> None:
        """Add a sentence for the run's reader."""
        self._notes.append(sentence)

    def not_collected(self, nodeid: str) -> None:
        """Record a collection error: the module's tests may well exist."""
        module = nodeid.partition("::")[0]
        self._incomplete[module] = f"{module} could not be collected"

    def module_skipped(self, nodeid: str) -> None:
        """Count a module that a condition on the device skipped when it was imported."""
        self._skipped_modules.add(nodeid)

    def output(self) -> dict[str, Any]:
        """Return this worker's data for the controller, as builtin types."""
        return {
            OUTPUT: {
                "collected": sorted(self._collected),
                "incomplete": self._incomplete,
                "skipped": sorted(self._skipped_modules),
                "marked": self.any_marked,
                "shard": self.shard,
            }
        }

    def take_output(self, output: Mapping[str, Any]) -> None:
        """Take in a worker's :meth:`output`."""
        if worker := output.get(OUTPUT):
            self.collected(worker["collected"], marked=worker["marked"])
            self.shard = worker["shard"]
            self._incomplete.update(worker["incomplete"])
            self._skipped_modules.update(worker["skipped"])

    def finish(self, exitstatus: int) -> bool:
        """Write baselines and reports; return whether everything could be written."""
        # An interrupted session has not seen all tests, so no baseline can be called unused.
        complete = exitstatus not in (
            pytest.ExitCode.INTERRUPTED,
            pytest.ExitCode.INTERNAL_ERROR,
            pytest.ExitCode.USAGE_ERROR,
        )
        errors = [*self._write_baselines(prune=complete), *self._write_reports()]
        if complete:
            errors += self._look_for_missing()
        self._notes += errors
        if self._records or self._settings.share or self._settings.shard:
            from pytest_gpumem.session.learning import keep

            lessons = self._stopwatch.lessons(self._records)
            if self.foreseen is not None:
                lessons.merge(self.foreseen)
            in_shard = self._settings.shard is not None
            self._notes += filter(None, [keep(self._config, lessons, in_shard=in_shard)])
        return not errors

    def failures_told_once(self, reporter: pytest.TerminalReporter) -> AbstractContextManager[None]:
        """Return the context in which pytest writes its summary, with each cause once."""
        if not self._sentences and not any(record.failed for record in self.records):
            return nullcontext()
        from pytest_gpumem.report.commands import Command
        from pytest_gpumem.report.failures import failures_of, told_once

        records = {nodeid: record for (nodeid, _), record in self._records.items()}
        failures = failures_of(records, self._sentences)
        verbosity = self._config.get_verbosity()
        return told_once(reporter, failures, Command.of(self._config), verbosity)

    def summarize(self) -> None:
        """Write the terminal's section, after the lines that the CI system reads."""
        for line in self._annotations:
            self._config.get_terminal_writer().line(line)
        notes = [
            *self._notes,
            *self._broken_plugins,
            *filter(None, [self.shard]),
            *self._hosts(),
            *self._uses(),
            *self._waits(),
            *self._skips(),
        ]
        if count := self._skipped_at_import:
            notes.append(
                f"{count} test{'s' * (count > 1)} that would be measured {_were(count)} skipped by "
                f"a condition that was evaluated at import: {AT_IMPORT}"
            )
        if count := len(self._skipped_modules):
            notes.append(
                f"{count} module{'s' * (count > 1)} {_were(count)} skipped by pytest.skip() as "
                f"{'they were' if count > 1 else 'it was'} imported: {AT_IMPORT}"
            )
        if self._settings.device.kind == "off" and self.any_marked:
            notes.append("--gpumem-device=off: marked tests ran without being measured")
        if not self._records and not notes and self._update is None:
            return
        from pytest_gpumem.report.commands import Command
        from pytest_gpumem.report.remarks import leaks, unmarked
        from pytest_gpumem.report.terminal import section, write_section

        notes += leaks(self.records)
        if not self._settings.all:
            notes += unmarked(self.records)

        writer = self._config.get_terminal_writer()
        verbosity = self._config.get_verbosity()
        lines = section(
            self.records,
            verbosity=verbosity,
            width=writer.fullwidth,
            update=self._update,
            notes=notes,
            command=Command.of(self._config),
            told_above=self._failures_are_shown,
            missing=self._missing,
            rows=self._settings.rows,
            sort=self._settings.sort,
            snippets=self._snippets,
        )
        write_section(writer, lines, verbosity=verbosity)

    def _skips(self) -> Iterator[str]:
        """Yield why tests could not be simulated; tests of one cause as one, unless verbose."""
        causes: dict[str, list[str]] = {}
        for nodeid, why in self._unsimulated.items():
            cause = self._undescribed.get(nodeid, why)
            causes.setdefault(cause, []).append(nodeid)
        verbose = self._config.get_verbosity() > 0
        for first, *others in causes.values():
            told = [first, *others] if verbose else [first]
            for nodeid in told:
                more = 0 if verbose else len(others)
                also = f" and {more} more test{'s' * (more > 1)}" if more else ""
                yield f"{nodeid}{also} {_were(more + 1)} skipped: {self._unsimulated[nodeid]}"

    def _uses(self) -> list[str]:
        """Return the lines on the usage of the devices that tests shared."""
        if not self.usages:
            return []
        from pytest_gpumem.sharing.usage import lines

        return lines(self.usages)

    def _waits(self) -> list[str]:
        """Return the lines on tests' waits for shared devices."""
        tests = {record.nodeid: record.sharing for record in self.records if record.sharing}
        if not tests:
            return []
        from pytest_gpumem.sharing.usage import waits

        return waits(tests)

    def _hosts(self) -> Iterable[str]:
        if len(self._environments) < 2:
            return ()
        from pytest_gpumem.session.hosts import differing

        return differing(self._environments)

    @property
    def _failures_are_shown(self) -> bool:
        option = self._config.option
        hidden = getattr(option, "no_summary", False) or getattr(option, "tbstyle", "") == "no"
        return not hidden

    def _write_baselines(self, *, prune: bool) -> Iterator[str]:
        settings = self._settings
        prune = prune and settings.prune
        if settings.update is None and not prune:
            return
        from pytest_gpumem.baseline.store import BaselineStore
        from pytest_gpumem.baseline.update import update_baselines

        self._update = update_baselines(
            BaselineStore(settings.baselines),
            list(self._measured_tests()),
            mode=settings.update,
            prune=prune,
            collected=self._collection(),
        )
        yield from self._update.errors

    def _look_for_missing(self) -> Iterator[str]:
        """Find baselines that no test uses; yield the errors where baselines are required."""
        settings = self._settings
        if settings.prune or not any(record.expectation for record in self.records):
            return
        from pytest_gpumem.session.missing import find_missing

        self._missing = find_missing(
            self._config, settings, list(self._measured_tests()), self._collection()
        )
        moved = self._missing.moved
        if moved and settings.require_baselines and settings.update is None:
            yield (
                f"{moved} test{'s' * (moved > 1)} {_were(moved)} compared with nothing, because "
                "what is stored has another name, which fails this run as baselines are required"
            )

    def _measured_tests(self) -> Iterator[MeasuredTest]:
        from pytest_gpumem.baseline.update import MeasuredTest

        for run, record in self._records.items():
            if record.measurement is not None and record.expectation:
                yield MeasuredTest(
                    nodeid=record.nodeid,
                    environment=record.environment,
                    measurement=record.measurement,
                    passed=record.outcome == "passed" and run not in self._failed,
                    rerun=run in self._rerun,
                    subtest_failed=run in self._subtest_failed,
                    wanted=record.expectation["baseline"] is not False,
                    tolerance=record.expectation["tolerance"],
                )

    def _collection(self) -> Collected:
        """Return the tests that exist, as far as this session can determine."""
        from pytest_gpumem.baseline.collected import Collected

        option = self._config.option
        root = self._config.rootpath
        if getattr(option, "lf", False):  # it leaves tests out while a module is collected
            return Collected.of(root, (), partial="--lf was given")
        given = getattr(option, "override_ini", None) or ()
        overridden = {setting.partition("=")[0] for setting in given}
        narrowed = next((f"-o {name} was given" for name in _COLLECTING if name in overridden), "")
        partial = ""
        if self._config.args_source is pytest.Config.ArgsSource.ARGS:
            partial = "paths were given"
        elif getattr(option, "ignore", None) or getattr(option, "ignore_glob", None):
            partial = "--ignore was given"
        incomplete = {**self._incomplete, **dict(self._given_by_id())}
        return Collected.of(root, self._collected, incomplete, partial, narrowed)

    def _given_by_id(self) -> Iterator[tuple[str, str]]:
        for arg in self._config.args:
            path, separator, _ = arg.partition("::")
            if separator:
                full = (self._config.invocation_params.dir / path).resolve()
                module = relative(full, self._config.rootpath).replace(os.sep, "/")
                yield module, "tests of it were given by id"

    def _write_reports(self) -> Iterator[str]:
        records, thinned = self.records, False
        for target in self._settings.reports:
            if target.unasked and not records:
                continue
            if target.path is not None and not target.unasked and not target.path.parent.exists():
                folder = target.path.parent
                self._notes.append(f"{folder} did not exist and was made for the report in it")
            from pytest_gpumem.report.reported_run import ReportedRun
            from pytest_gpumem.report.thinned import thin
            from pytest_gpumem.report.written import write

            if not thinned:
                records, thinned = thin(records), True

            run = ReportedRun(
                records,
                root=self._config.rootpath,
                lines=self._lines,
                skipped=self._unsimulated,
                usage=[usage.to_dict() for usage in self.usages],
                command=_from_anywhere(self._config),
            )
            try:
                self._annotations += write(target, run)
            except ValueError as error:
                yield str(error)


def _from_anywhere(config: pytest.Config) -> str:
    """Return the command of pytest where a report is read: at the rootdir, on another machine."""
    device = config.getoption("gpumem_device", None)
    return f"pytest --gpumem-device={device}" if device else "pytest"


def _were(count: int) -> str:
    return "were" if count > 1 else "was"
