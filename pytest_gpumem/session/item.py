"""One attempt at a measured test: run, judge, explain, in this order."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

import pytest
import torch

from pytest_gpumem.baseline.store import BaselineError
from pytest_gpumem.baseline.verdict import failure_text
from pytest_gpumem.measurement.composition import explained_by
from pytest_gpumem.measurement.fixtures import FixtureRecords
from pytest_gpumem.measurement.recorded import RecordedHistory, write_snapshot
from pytest_gpumem.options import Settings
from pytest_gpumem.report.commands import Command
from pytest_gpumem.report.pytest_reports import ATTRIBUTE, BROKEN_PLUGINS, SENTENCE, with_outcome
from pytest_gpumem.report.record import TestRecord, set_user_properties
from pytest_gpumem.session.hooks import Hooks
from pytest_gpumem.session.judge import Judge
from pytest_gpumem.session.run import STACKS_FOR_EXPLANATION, Prepared, TestRun
from pytest_gpumem.sharing.admission import failed_allocation_sentence
from pytest_gpumem.sizes import format_size, in_words
from pytest_gpumem.values.errors import SimulationError
from pytest_gpumem.values.measurement import Measurement

RunsAgain = Callable[["MeasuredItem", BaseException], bool]

_OUTCOMES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""Exceptions of a recorded run; the failure that pytest reports is the first run's."""

_UNEXPECTED_SUCCESS = "Unexpected success"
"""Text of the failure that pytest's ``TestCaseFunction.addUnexpectedSuccess`` collects."""


class MeasuredItem(TestRun):
    """An attempt at a test: a run that is judged and explained.

    ``runs_again`` is given where devices are shared: it returns whether a test that ran out of
    memory runs once more. Such a failure is not explained.
    """

    def __init__(
        self,
        prepared: Prepared,
        ledger: FixtureRecords,
        settings: Settings,
        hooks: Hooks,
        judge: Judge,
        runs_again: RunsAgain | None,
    ) -> None:
        super().__init__(prepared, ledger, settings, hooks)
        self._judge = judge
        self._runs_again = runs_again
        self.body_raised = False
        """Whether the body failed, rather than its measurement."""
        self._subtest_failed = False
        self._record: TestRecord | None = None
        self._sections: list[str] = []
        """The lines that are shown below the failure."""
        self._sentence = ""
        """The text of a failure that another process or the device caused."""

    @property
    def measurement(self) -> Measurement | None:
        """The measurement of the test's own device; ``None`` before it is known."""
        return self._record.measurement if self._record else None

    def complete(self, report: pytest.TestReport, *, raised: bool) -> None:
        """Put the record on the final report of the call, as builtin types."""
        if self.in_body:  # a subtest's: they are reported while the body runs
            self._subtest_failed |= raised and report.failed
            return
        if report.when == "call" and self._sentence:
            setattr(report, SENTENCE, self._sentence)
        if report.when == "call" and self._record is not None:
            # The notes say if a value was made up, which may have caused the failure.
            notes = self.measurement.notes if self.measurement else ()
            if report.failed and (sections := [*self._sections, *notes]):
                report.sections.append(("gpumem", "\n".join(sections)))
            record = with_outcome(self._record, report)
            if record is not None:
                setattr(report, ATTRIBUTE, record.to_dict())
                self._hooks.call_with(self.item, record)
                if self._hooks.broken:
                    setattr(report, BROKEN_PLUGINS, list(self._hooks.broken.values()))

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Run the body inside, after its warm-up runs; then measure and judge it, or fail it."""
        try:
            for _ in range(self.prepared.runs - 1):
                with self.body():
                    self.item.runtest()
            with self.body():
                yield
        except (pytest.skip.Exception, SimulationError):
            raise
        except BaseException as error:
            self.body_raised = True
            with suppress(BaselineError):  # the body's own failure is more important
                self._finish()
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if is_out_of_memory and not (self._runs_again and self._runs_again(self, error)):
                self._sections += self._explain_shortage(error)
            raise
        # unittest's failures are no exceptions here: the item collects them.
        failures = getattr(self.item, "_excinfo", None) or []
        succeeded = all(str(one.value).startswith(_UNEXPECTED_SUCCESS) for one in failures)
        self.body_raised = self._subtest_failed or not succeeded
        self._judged(self._finish)
        self.body_raised |= bool(failures)

    def judge(self, measured: Measurement, others: Sequence[Measurement], *, ranks: str) -> None:
        """Judge the rank named ``ranks`` by everything, and the ``others`` only by limits."""
        self._judged(lambda: self._take(measured, others, passed=True, ranks=ranks))

    def note(self, *sentences: str) -> None:
        """Add ``sentences`` to the notes of the measurement."""
        record = self._record
        if sentences and record is not None and record.measurement is not None:
            notes = (*record.measurement.notes, *sentences)
            self._record = replace(record, measurement=replace(record.measurement, notes=notes))

    def _finish(self) -> None:
        """Measure the last run, and judge it; one of several ranks is judged after all have run."""
        passed = not self.body_raised
        own, others = self.measured(passed=passed)
        used = [other for other in others if other.peak_allocated > 0]
        self._take(own, used, passed=passed and not self.prepared.among_ranks)
        if not passed and self._record is not None:
            self.note(*self._snapshot())

    def _take(
        self, own: Measurement, others: Sequence[Measurement], *, passed: bool, ranks: str = ""
    ) -> None:
        try:
            self._record = self._judge.record(
                self.prepared, own, others, passed=passed, ranks=ranks
            )
        except BaselineError:  # what was measured is reported without verdicts
            self._record = self._judge.record(self.prepared, own, others, passed=False, ranks=ranks)
            raise
        finally:
            if self._record is not None:
                set_user_properties(self.item.user_properties, self._record)

    def _judged(self, judge: Callable[[], None]) -> None:
        """Call ``judge``; then fail the test where a verdict does not pass."""
        try:
            judge()
        except BaselineError as error:
            self._sentence = str(error)
        if self._sentence:  # raised outside of handlers, so that it has no context
            self._fail(self._sentence)
        record = self._record
        if record is None or not record.broken:
            return
        self.note(*self._explain(record) if self.is_explained_later else self._snapshot())
        config, broken = self.item.config, (self._record or record).broken
        update = Command.of(config).records(record.nodeid)
        self._fail(failure_text(broken, update, every=config.get_verbosity() > 1))

    def _fail(self, text: str) -> NoReturn:
        """Fail the test, or let it fail as expected if it is an ``unittest.expectedFailure``."""
        if not self.body_raised and (failures := getattr(self.item, "_excinfo", None)):
            failures.clear()  # the unexpected successes of a body that is judged
            pytest.xfail(text)
        pytest.fail(text, pytrace=False)

    def _explain(self, record: TestRecord) -> Sequence[str]:
        """Run the body again, recorded; if it passes, add its sites to the record; return notes."""
        item, recorder = self.item, RecordedHistory()
        try:
            with recorder.during(STACKS_FOR_EXPLANATION):
                self.record_again(recorder)
                with self.body():
                    item.runtest()
                own, others = self.measured(passed=True)
                # Written here, because the recording is gone afterwards.
                notes = self._snapshot()
        except _OUTCOMES as error:
            why = (
                f"{item.nodeid}: the lines that hold its memory are unknown, because the body "
                "failed when it was run a second time to record them: "
                f"{type(error).__name__}: {error}"
            )
            return [*self._snapshot(), why]
        again = {one.device: one for one in (own, *others)}
        first, *rest = (
            explained_by(one, again[one.device]) if one.device in again else one
            for one in record.measurements
        )
        self._record = self._judge.record(self.prepared, first, rest, passed=True) or record
        return notes

    def _explain_shortage(self, error: BaseException) -> list[str]:
        """Record why the body ran out of memory, and return the lines on it.

        The body is run again for that if it was not recorded.
        """
        if not self.is_explained_later:
            return self._post_mortem()
        # The frames hold memory of the first run, which the second one needs. pytest
        # still shows the traceback, without the values of its variables.
        traceback.clear_frames(error.__traceback__)
        recorder = RecordedHistory()
        with recorder.during(STACKS_FOR_EXPLANATION), suppress(*_OUTCOMES):
            self.record_again(recorder)
            try:
                with self.body():
                    self.item.runtest()
            except torch.OutOfMemoryError:
                lines = self._post_mortem()
                if self._record is not None:
                    self._snapshot()
                return lines
        return []

    def _post_mortem(self) -> list[str]:
        found, shortage, record = self.out_of_memory(), self.shortage, self._record
        quota = self.prepared.quota
        lines = [] if shortage is None else [failed_allocation_sentence(shortage, quota)]
        if found is None or record is None:
            return lines
        lines += found.lines()
        expectation = self.prepared.expectation
        limit = expectation.max if expectation else None
        if limit is not None and found.allocated > limit:
            written = in_words(limit) or format_size(limit)
            text = format_size(found.allocated)
            lines.append(f"  its limit max={written} was passed before: {text} were allocated")
        self._record = replace(record, out_of_memory=found.to_dict())
        return ["\n".join(lines)]

    def _snapshot(self) -> list[str]:
        """Write the artifact if it is requested; return the sentence on it."""
        folder, nodeid = self.settings.artifacts, self.item.nodeid
        if folder is None:
            return []
        try:
            return [f"{nodeid}: its snapshot is {write_snapshot(folder, nodeid)}"]
        except OSError as error:
            return [
                f"{nodeid}: its snapshot cannot be written: {error.strerror or error}; "
                "give --gpumem-artifacts a folder that can be written"
            ]
