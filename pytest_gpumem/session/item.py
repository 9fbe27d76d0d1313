"""One attempt at a measured test: run, judge, explain, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from pytest_gpumem.baseline.store import BaselineError
from pytest_gpumem.device.device import Device
from pytest_gpumem.report.pytest_reports import ATTRIBUTE, BROKEN_PLUGINS, SENTENCE, with_outcome
from pytest_gpumem.report.record import TestRecord, set_user_properties
from pytest_gpumem.session.explain import (
    explained_again,
    needs_second_run,
    out_of_memory,
    snapshot_of,
)
from pytest_gpumem.session.hooks import Hooks
from pytest_gpumem.session.judge import Judge
from pytest_gpumem.session.run import Run
from pytest_gpumem.sharing.refusal import Refusal
from pytest_gpumem.values.errors import SimulationError
from pytest_gpumem.values.measurement import Measurement

RunsAgain = Callable[[Refusal | None, int | None, Exception], bool]


class MeasuredItem:
    """An attempt at a test.

    ``runs_again`` returns, where devices are shared, whether a test that ran out of memory is run
    once more, so that this failure need not be explained.
    """

    def __init__(self, run: Run, judge: Judge, hooks: Hooks, runs_again: RunsAgain | None) -> None:
        self.run = run
        self._item = run.prepared.item
        self._judge = judge
        self._hooks = hooks
        self._runs_again = runs_again
        self.body_raised = False
        """Whether the body failed, rather than its measurement."""
        self._subtest_failed = False
        self._record: TestRecord | None = None
        self._sections: list[str] = []
        """The lines that are shown below the failure."""
        self._sentence = ""
        """The text of a failure that is not due to the test's own memory."""

    @property
    def nodeid(self) -> str:
        """The test's node id."""
        return self._item.nodeid

    @property
    def device(self) -> Device:
        """The device that the test runs on."""
        return self.run.prepared.device

    @property
    def measurement(self) -> Measurement | None:
        """The measurement of the test's own device; ``None`` before it is known."""
        return self._record.measurement if self._record else None

    def close(self) -> None:
        """Restore the state of the process."""
        self.run.close()

    def complete(self, report: pytest.TestReport, *, raised: bool) -> None:
        """Put the record on the final report of the call, as builtin types."""
        if self.run.in_body:  # a subtest's: they are reported while the body runs
            self._subtest_failed |= raised and report.failed
        elif report.when == "call" and self._sentence:
            setattr(report, SENTENCE, self._sentence)
        elif report.when == "call" and self._record is not None:
            # A failure may come from a value that was made up, which the notes say.
            notes = self.measurement.notes if self.measurement else ()
            if report.failed and (sections := [*self._sections, *notes]):
                report.sections.append(("gpumem", "\n".join(sections)))
            record = with_outcome(self._record, report)
            if record is not None:
                setattr(report, ATTRIBUTE, record.to_dict())
                self._hooks.call_with(self._item, record)
                if self._hooks.broken:
                    setattr(report, BROKEN_PLUGINS, list(self._hooks.broken.values()))

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Run the body inside, after its warm-up runs; then measure and judge it, or fail it."""
        run = self.run
        try:
            for _ in range(run.prepared.runs - 1):
                with run.body():
                    self._item.runtest()
            with run.body():
                yield
        except (pytest.skip.Exception, SimulationError):
            raise
        except BaseException as error:
            self.body_raised = True
            with suppress(BaselineError):  # the body's own failure is more important
                self._finish()
            if isinstance(error, torch.OutOfMemoryError) and not (
                self._runs_again and self._runs_again(run.shortage, run.prepared.quota, error)
            ):
                self._record, lines = out_of_memory(run, self._record, error)
                self._sections += lines
            raise
        # unittest's failures do not reach pytest as exceptions: the item collects them.
        self.body_raised = self._subtest_failed or bool(getattr(self._item, "_excinfo", None))
        self._judged(self._finish)

    def judge(self, measured: Measurement, others: Sequence[Measurement], *, ranks: str) -> None:
        """Judge the memory of the rank named ``ranks``, and by limits that of the ``others``."""
        self._judged(lambda: self._take(measured, others, passed=True, ranks=ranks))

    def note(self, *sentences: str) -> None:
        """Add ``sentences`` to the notes of the measurement."""
        record = self._record
        if sentences and record is not None and record.measurement is not None:
            notes = (*record.measurement.notes, *sentences)
            self._record = replace(record, measurement=replace(record.measurement, notes=notes))

    def _finish(self) -> None:
        """Measure the last run, and judge it unless it is for all ranks to judge."""
        passed = not self.body_raised
        own, others = self.run.measured(passed=passed)
        used = [other for other in others if other.peak_allocated > 0]
        self._take(own, used, passed=passed and not self.run.prepared.among_ranks)
        if not passed and self._record is not None:
            self.note(*snapshot_of(self.run))

    def _take(
        self, own: Measurement, others: Sequence[Measurement], *, passed: bool, ranks: str = ""
    ) -> None:
        self._record = self._judge.record(
            self.run.prepared, own, others, passed=passed, ranks=ranks
        )
        if self._record is not None:
            set_user_properties(self._item.user_properties, self._record)

    def _judged(self, judge: Callable[[], None]) -> None:
        """Call ``judge``; then fail the test where a verdict does not pass."""
        try:
            judge()
        except BaselineError as error:
            self._sentence = str(error)
        if self._sentence:  # outside of handlers, so that no other exception precedes it
            pytest.fail(self._sentence, pytrace=False)
        record = self._record
        if record is None or not record.broken:
            return
        if needs_second_run(self.run):
            explained, notes = explained_again(self.run, record)
            if explained:
                prepared = self.run.prepared
                again = self._judge.record(prepared, explained[0], explained[1:], passed=True)
                record = self._record = again or record
        else:
            notes = snapshot_of(self.run)
        self.note(*notes)
        pytest.fail(self._judge.failure_text(record), pytrace=False)
