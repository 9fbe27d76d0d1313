"""What became of the tests: collected in the process that reports, written at its end."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.baseline.update import Collected, MeasuredTest, UpdateReport
    from pytest_gpumem.options import Settings
    from pytest_gpumem.report.record import TestRecord

ATTRIBUTE = "gpumem"
"""Of a test's final call report: its record as builtin types, for pytest-xdist."""

ARGUMENTS = "gpumem_arguments"
"""Key of a pytest-xdist worker's input: what pytest was started with."""

OUTPUT = "gpumem"
"""Key of a pytest-xdist worker's output."""


UNSIMULATED = "gpumem_unsimulated"
"""Of a test's report: the sentence that says why a simulated device cannot run it."""


SKIPPED_AT_IMPORT = "gpumem_skipped_at_import"
"""Of the report of a test that would be measured: what skipped it was evaluated at import."""


AT_IMPORT = "there a GPU that is simulated exists only with --gpumem-sim-scope=session"


def suggested_command(config: pytest.Config) -> str:
    """Return how pytest was started, as far as baselines depend on it."""
    device = config.getoption("gpumem_device", None)
    return f"pytest --gpumem-device={device}" if device else "pytest"


def hide_own_frames() -> None:
    """Let tracebacks end in the user's code: pytest leaves out modules that ask for it."""
    if "pytest_gpumem.simulated.execution" not in sys.modules:
        return  # then none of them runs below a test's code
    own = f"{__package__.partition('.')[0]}."
    # A copy is made at once: another thread may import meanwhile, and anything may stand there.
    for name, module in sys.modules.copy().items():
        if isinstance(name, str) and name.startswith(own) and isinstance(module, ModuleType):
            vars(module)["__tracebackhide__"] = True


def leave_the_sentence(report: pytest.TestReport, error: BaseException) -> None:
    """Let nothing stand behind a failure that is one sentence of ours.

    Where every frame is hidden, as in a set-up that does not get as far as the user's code, pytest
    adds a line on how to see them.
    """
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        for traceback, *_ in getattr(report.longrepr, "chain", ()):
            traceback.extraline = None


def skip_unsimulated(item: pytest.Item, report: pytest.TestReport, error: BaseException) -> None:
    """Let ``report`` be that of a skipped test where ``error`` is the simulation's.

    Not a failure, because the code may be right, and not an expected one either.
    """
    from pytest_gpumem.simulated.errors import SimulationError

    if not isinstance(error, SimulationError):
        return
    path, line, _ = item.location
    report.outcome = "skipped"
    report.longrepr = (path, (line or 0) + 1, f"Skipped: {error}")
    vars(report).pop("wasxfail", None)
    setattr(report, UNSIMULATED, str(error))


class Results:
    """The records of all tests, and how pytest saw the tests end."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._records: dict[str, TestRecord] = {}
        self._failed: set[str] = set()
        self._subtest_failed: set[str] = set()
        self._rerun: set[str] = set()
        self._collected: set[str] = set()
        self._incomplete: dict[str, str] = {}
        self._notes: list[str] = []
        self._unsimulated: dict[str, str] = {}
        self._skipped_at_import = 0
        self._skipped_modules: set[str] = set()
        self._update: UpdateReport | None = None
        self.shared: list[str] = []
        """What the run made of devices that it shared, line by line."""
        self.any_marked = False
        """Whether any collected test is marked."""

    @property
    def records(self) -> list[TestRecord]:
        """One for each test that ran to its end, in the order in which they did."""
        return list(self._records.values())

    def take(self, report: pytest.TestReport) -> None:
        """Take in one report of a test."""
        nodeid = without_group(report.nodeid)
        outcome: str = report.outcome
        if outcome == "rerun":  # by pytest-rerunfailures: this attempt does not count
            self._rerun.add(nodeid)
            return
        if getattr(report, SKIPPED_AT_IMPORT, False):
            self._skipped_at_import += 1
        if sentence := getattr(report, UNSIMULATED, None):
            self._unsimulated[nodeid] = sentence
        if report.failed:
            subtest = hasattr(report, "context")
            (self._subtest_failed if subtest else self._failed).add(nodeid)
        if data := getattr(report, ATTRIBUTE, None):
            from pytest_gpumem.report.record import TestRecord

            self._records[nodeid] = replace(TestRecord.from_dict(data), nodeid=nodeid)
        if report.failed and nodeid in self._records and not hasattr(report, "context"):
            # Not yet known when the record was made: a failed subtest, an error of the teardown.
            outcome = "failed" if report.when == "call" else "error"
            self._records[nodeid] = replace(self._records[nodeid], outcome=outcome)

    def collected(self, nodeids: Iterable[str], *, marked: bool) -> None:
        """Take in the ids of all collected tests, and whether any of them is marked."""
        self._collected.update(map(without_group, nodeids))
        self.any_marked |= marked

    def not_collected(self, nodeid: str) -> None:
        """Remember what could not be collected: its tests may well exist."""
        module = nodeid.partition("::")[0]
        self._incomplete[module] = f"{module} could not be collected"

    def module_skipped(self, nodeid: str) -> None:
        """Count a module that a condition on the device skipped when it was imported."""
        self._skipped_modules.add(nodeid)

    def output(self) -> dict[str, Any]:
        """Return what the controller has to know of this worker, as builtin types."""
        return {
            OUTPUT: {
                "collected": sorted(self._collected),
                "incomplete": self._incomplete,
                "skipped": sorted(self._skipped_modules),
                "marked": self.any_marked,
            }
        }

    def take_output(self, output: Mapping[str, Any]) -> None:
        """Take in what a worker's :meth:`output` says."""
        if worker := output.get(OUTPUT):
            self.collected(worker["collected"], marked=worker["marked"])
            self._incomplete.update(worker["incomplete"])
            self._skipped_modules.update(worker["skipped"])

    def finish(self, exitstatus: int) -> bool:
        """Write baselines and reports; return whether everything could be written."""
        # An interrupted session has not seen all tests, so nothing can be called gone.
        complete = exitstatus not in (
            pytest.ExitCode.INTERRUPTED,
            pytest.ExitCode.INTERNAL_ERROR,
            pytest.ExitCode.USAGE_ERROR,
        )
        errors = [*self._write_baselines(prune=complete), *self._write_reports()]
        self._notes += errors
        return not errors

    def summarize(self) -> None:
        """Write the section of the terminal."""
        notes = [
            *self._notes,
            *self.shared,
            *(f"{nodeid} was skipped: {why}" for nodeid, why in self._unsimulated.items()),
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
        from pytest_gpumem.report.terminal import section, write_section

        writer = self._config.get_terminal_writer()
        verbosity = self._config.get_verbosity()
        lines = section(
            self.records,
            verbosity=verbosity,
            width=writer.fullwidth,
            update=self._update,
            notes=notes,
            command=suggested_command(self._config),
        )
        write_section(writer, lines, verbosity=verbosity)

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

    def _measured_tests(self) -> Iterator[MeasuredTest]:
        from pytest_gpumem.baseline.update import MeasuredTest

        for nodeid, record in self._records.items():
            if record.measurement is not None and record.expectation:
                yield MeasuredTest(
                    nodeid=nodeid,
                    environment=record.environment,
                    measurement=record.measurement,
                    passed=record.outcome == "passed" and nodeid not in self._failed,
                    rerun=nodeid in self._rerun,
                    subtest_failed=nodeid in self._subtest_failed,
                    wanted=record.expectation["baseline"] is not False,
                )

    def _collection(self) -> Collected:
        """Return which tests exist, as far as this session can tell."""
        from pytest_gpumem.baseline.update import Collected

        option = self._config.option
        root = self._config.rootpath
        if getattr(option, "lf", False):  # it leaves tests out while a module is collected
            return Collected.of(root, (), partial="--lf was given")
        partial = ""
        if self._config.args_source is pytest.Config.ArgsSource.ARGS:
            partial = "paths were given"
        elif getattr(option, "ignore", None) or getattr(option, "ignore_glob", None):
            partial = "--ignore was given"
        incomplete = {**self._incomplete, **dict(self._given_by_id())}
        return Collected.of(root, self._collected, incomplete, partial)

    def _given_by_id(self) -> Iterator[tuple[str, str]]:
        for arg in self._config.args:
            path, separator, _ = arg.partition("::")
            if separator:
                full = (self._config.invocation_params.dir / path).resolve()
                module = os.path.relpath(full, self._config.rootpath).replace(os.sep, "/")
                yield module, "tests of it were given by id"

    def _write_reports(self) -> Iterator[str]:
        for target in self._settings.reports:
            from pytest_gpumem.report.json_report import ReportError, write_report

            try:
                write_report(target.path, self.records)
            except ReportError as error:
                yield str(error)


def without_group(nodeid: str) -> str:
    """Return ``nodeid`` without the ``@group`` that ``--dist loadgroup`` appends."""
    path, separator, name = nodeid.partition("::")
    return path + separator + re.sub(r"@[^@\]]*$", "", name)


def _were(count: int) -> str:
    return "were" if count > 1 else "was"
