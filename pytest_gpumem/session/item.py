"""The course of one test in pytest: set-up, runs of its body, verdicts, teardown."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpumem.baseline.store import BaselineError
from pytest_gpumem.marker import Expectation
from pytest_gpumem.measurement.composition import Account, explained_by
from pytest_gpumem.measurement.fixtures import FixtureLedger
from pytest_gpumem.measurement.history import write_snapshot
from pytest_gpumem.measurement.leaks import values_given
from pytest_gpumem.measurement.meter import Meter, values_of
from pytest_gpumem.measurement.recorded import RecordedHistory
from pytest_gpumem.measurement.statistics import CudaStatistics
from pytest_gpumem.measurement.unmeasured import pausable
from pytest_gpumem.prediction.expected import Expected
from pytest_gpumem.report.junit import set_user_properties
from pytest_gpumem.report.pytest_reports import ATTRIBUTE, BROKEN_PLUGINS, SENTENCE, with_outcome
from pytest_gpumem.session import used_fixtures
from pytest_gpumem.session.kept import process_kept
from pytest_gpumem.sharing.refusal import Cause, Refusal, cause_of
from pytest_gpumem.sharing.refusal import sentence as sentence_of
from pytest_gpumem.sizes import format_size
from pytest_gpumem.values.errors import SimulationError

if TYPE_CHECKING:
    from _pytest.fixtures import FixtureDef

    from pytest_gpumem.attribution.out_of_memory import OutOfMemory
    from pytest_gpumem.device.device import Device
    from pytest_gpumem.measurement.recorder import Recorder
    from pytest_gpumem.options import Settings
    from pytest_gpumem.report.record import TestRecord
    from pytest_gpumem.session.hooks import Hooks
    from pytest_gpumem.session.judge import Judge
    from pytest_gpumem.values.measurement import Measurement, PhaseRecord
    from pytest_gpumem.values.prediction import PredictedTest


_OUTCOMES = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""Exceptions of a second run that do not replace the first one's failure."""

EXPLAINED_BY = "all"
"""The stacks recorded to explain a failure: Python's, and C++'s, which name operators."""


class MeasuredItem:
    """The measurement of one attempt at one test.

    ``expectation`` is ``None`` for a test that is measured without being judged, ``quota`` the
    bytes that the process may reserve during it. ``runs_again`` returns for a test that ran out
    of memory whether it is run once more, so that this failure need not be explained: given the
    refused allocation, the quota and the error. With ``among_ranks`` it is judged when all of them
    have run, by :meth:`judge`.
    """

    def __init__(
        self,
        item: pytest.Item,
        expectation: Expectation | None,
        device: Device,
        ledger: FixtureLedger,
        judge: Judge,
        settings: Settings,
        predicted: PredictedTest | None = None,
        quota: int | None = None,
        runs_again: Callable[[Refusal | None, int | None, Exception], bool] | None = None,
        *,
        hooks: Hooks,
        among_ranks: bool = False,
    ) -> None:
        self._predicted = predicted
        self._hooks = hooks
        self._among_ranks = among_ranks
        self._runs_again = runs_again
        self._item = item
        self._settings = settings
        self._expectation = expectation
        self._judge = judge
        self._resources = ExitStack()
        self.device = device
        self._in_body = False
        self._expected_before = Expected()
        """The expected bytes of objects that fixtures name."""
        self._expected = Expected()
        """The expected bytes of these and objects that the body names, in its last run."""
        self.body_raised = False
        """Whether the body failed, rather than its measurement."""
        self._subtest_failed = False
        self._record: TestRecord | None = None
        self._sections: list[str] = []
        """The lines that are shown below the failure."""
        self._sentence = ""
        """The text of a failure that is not due to the test's own memory."""
        with ExitStack() as starting:
            starting.enter_context(device.active())
            starting.enter_context(device.measuring(item.nodeid))
            statistics = CudaStatistics(device.workspaces)
            starting.enter_context(statistics.screened())
            recorder = device.recorder
            # A rank cannot run once more without the others.
            always = ("always", "failed") if among_ranks else ("always",)
            if recorder is None and (settings.history or settings.explain in always):
                recorder = RecordedHistory()
                starting.enter_context(recorder.during(settings.history or EXPLAINED_BY))
            self._explained = recorder is not None
            account = _account(recorder, item, settings, hooks) if recorder is not None else None
            numbered = settings.loop_phases == "numbered"
            self._meter = Meter(statistics, ledger, account, numbered=numbered, apart=device.apart)
            starting.enter_context(pausable(self._meter.unmeasured))
            starting.enter_context(pausable(device.unmeasured))
            fixtures = ledger.with_nested(used_fixtures.expected_fixtures(item))
            device.begin_test(item.nodeid, fixtures, ledger.renewed)
            self._quota = quota
            self._refusals: Sequence[Refusal] = ()
            if quota is not None or settings.share:
                self._refusals = starting.enter_context(device.refusals())
            if quota is not None:
                # Its key is computed from the settings before a quota adds one for child processes.
                assert device.environment
                starting.enter_context(device.limited(quota))
            self._meter.begin_set_up()
            self._resources = starting.pop_all()

    @property
    def nodeid(self) -> str:
        """The test's node id."""
        return self._item.nodeid

    def close(self) -> None:
        """Restore the state of the process."""
        self._resources.close()

    @contextmanager
    def setting_up(
        self, fixture: FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """Meter the set-up of one fixture."""
        found = set(used_fixtures.active_fixtures(request).values())
        if self._in_body:
            self._bring_fixtures()
        else:
            self.device.restart_collector()
        with self._meter.setting_up(fixture) as nested:
            try:
                yield
            finally:
                asked_for = set(used_fixtures.active_fixtures(request).values()) - found - {fixture}
                nested.extend(asked_for - set(nested))

    def _bring_fixtures(self) -> None:
        """Put fixtures into this test's memory that its body requests and earlier tests set up."""
        for fixture in self.device.absent(used_fixtures.fixtures_of(self._item)):
            self._meter.found(fixture, partial(self.device.bring, fixture))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter the phase ``name`` inside."""
        with self._meter.tracker.window(name):
            yield

    def watch(self, holder: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Attribute the memory of ``holder`` to it."""
        self._meter.watch(holder)
        (self._expected if self._in_body else self._expected_before).add(holder)

    def phases(self) -> Mapping[str, PhaseRecord]:
        """Return the phases left so far, on the test's device."""
        return self._meter.phases(self.device.index)

    def complete(self, report: pytest.TestReport, *, raised: bool) -> None:
        """Put the record on the final report of the call, as builtin types."""
        if self._in_body:  # a subtest's: they are reported while the body runs
            self._subtest_failed |= raised and report.failed
        elif report.when == "call" and self._sentence:
            setattr(report, SENTENCE, self._sentence)
        elif report.when == "call" and self._record is not None:
            measurement = self._record.measurement
            if report.failed and measurement:
                # A failure may come from a value that was made up.
                sections = [*self._sections, *measurement.notes]
                if sections:
                    report.sections.append(("gpumem", "\n".join(sections)))
            record = with_outcome(self._record, report)
            if record is not None:
                setattr(report, ATTRIBUTE, record.to_dict())
                self._hooks.tell(self._item, record)
                if self._hooks.broken:
                    setattr(report, BROKEN_PLUGINS, list(self._hooks.broken.values()))

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Run the body inside, after its warm-up runs; then measure and judge it.

        Raises pytest's ``Failed`` where the body passed and a verdict does not.
        """
        try:
            for _ in range(self._runs() - 1):
                with self._run():
                    self._item.runtest()
            with self._run():
                yield
        except (pytest.skip.Exception, SimulationError):
            raise
        except BaseException as error:
            self.body_raised = True
            with suppress(BaselineError):  # the body's own failure is more important
                self._finish(passed=False)
            if isinstance(error, torch.OutOfMemoryError) and not self._will_run_again(error):
                self._examine(error)
            raise
        try:
            self.body_raised = not self._passed()
            self._finish(passed=not self.body_raised)
        except BaselineError as error:
            self._sentence = str(error)
        self._fail_if_broken()

    def _fail_if_broken(self) -> None:
        if self._sentence:  # outside of handlers, so that no other exception precedes it
            pytest.fail(self._sentence, pytrace=False)
        if self._record is not None and self._record.broken:
            if not self._explained and self._settings.explain == "failed":
                self._explain()
            else:
                self._write_snapshot()
            pytest.fail(self._judge.failure_text(self._record), pytrace=False)

    @property
    def measurement(self) -> Measurement | None:
        """The measurement of the test's own device; ``None`` before it is known."""
        return self._record.measurement if self._record else None

    def judge(self, measured: Measurement, others: Sequence[Measurement], *, ranks: str) -> None:
        """Judge the memory of one of several ranks, and by limits that of the ``others``.

        ``ranks`` names that rank. Raises pytest's ``Failed`` where a verdict does not pass.
        """
        try:
            self._take(measured, others, passed=True, ranks=ranks)
        except BaselineError as error:
            self._sentence = str(error)
        self._fail_if_broken()

    def _will_run_again(self, error: Exception) -> bool:
        return self._runs_again is not None and self._runs_again(self.shortage, self.quota, error)

    @property
    def quota(self) -> int | None:
        """The bytes that the process may reserve while the test runs; ``None`` for no limit."""
        return self._quota

    @property
    def shortage(self) -> Refusal | None:
        """The last allocation that the allocator refused, preferably one caused by a neighbour.

        ``None`` where none was refused, or where refusals are not observed.
        """
        crowded = [one for one in self._refusals if cause_of(one, self._quota) is Cause.NEIGHBOUR]
        found = crowded or self._refusals
        return found[-1] if found else None

    def _examine(self, error: torch.OutOfMemoryError) -> None:
        """Explain why the body ran out of memory; rerun it for that if it was not recorded."""
        if not self._explained and self._settings.explain == "failed":
            # Else memory of the first run would be missing from the second one's. pytest
            # shows the traceback all the same, without the values of its variables.
            traceback.clear_frames(error.__traceback__)
            recorder = RecordedHistory()
            with recorder.during(EXPLAINED_BY), suppress(*_OUTCOMES):
                self._meter.account_by(_account(recorder, self._item, self._settings, self._hooks))
                try:
                    with self._run():
                        self._item.runtest()
                except torch.OutOfMemoryError:
                    self._take_post_mortem()
                    self._snapshot()
        else:
            self._take_post_mortem()

    def _take_post_mortem(self) -> None:
        release = self.device.environment.torch.split(".")
        found = self._meter.out_of_memory(
            self.device.index,
            total=self.device.total_memory,
            version=(int(release[0]), int(release[1])),
        )
        shortage = self.shortage
        cause = [] if shortage is None else [sentence_of(shortage, self._quota)]
        if found is not None and self._record is not None:
            self._record = replace(self._record, out_of_memory=found.to_dict())
            lines = [*cause, *found.lines(), *self._passed_its_limit(found)]
            self._sections.append("\n".join(lines))
        else:
            self._sections += cause

    def _passed_its_limit(self, found: OutOfMemory) -> Iterator[str]:
        """Yield the sentence that the test exceeded its own limit before it ran out of memory."""
        limit = self._expectation.max if self._expectation else None
        if limit is not None and found.allocated > limit:
            written = getattr(limit, "written", "") or format_size(limit)
            text = format_size(found.allocated)
            yield f"  its limit max={written} was passed before: {text} were allocated"

    def _explain(self) -> None:
        """Run the body once more, with its allocations recorded, to find the holders of the bytes.

        The numbers of the earlier run count.
        """
        assert self._record is not None
        judged = self._record
        recorder = RecordedHistory()
        try:
            with recorder.during(EXPLAINED_BY):
                self._meter.account_by(_account(recorder, self._item, self._settings, self._hooks))
                with self._run():
                    self._item.runtest()
                again = self._measured(passed=True)
                # Written here, because the recording is gone afterwards.
                snapshot = self._snapshot()
        except _OUTCOMES as error:
            self._write_snapshot()
            self._note(
                f"{self._item.nodeid}: nothing explains its memory, because the body does not run "
                f"twice: {type(error).__name__}: {error}"
            )
            return
        pairs = [(first, again.get(first.device)) for first in judged.measurements]
        explained = [explained_by(one, two) if two else one for one, two in pairs]
        self._record = self._judge.record(
            self._item.nodeid,
            self._expectation,
            self.device,
            explained[0],
            explained[1:],
            passed=True,
            predicted=self._predicted,
        )
        self._note(snapshot)

    def _runs(self) -> int:
        expectation = self._expectation
        return expectation.warmup + expectation.repeat if expectation else 1

    @contextmanager
    def _run(self) -> Iterator[None]:
        self.device.begin_body()
        with self._meter.running(used_fixtures.fixtures_of(self._item)):
            self._in_body = True
            self._expected = Expected(self._expected_before)
            try:
                with (
                    self._meter.watching(),
                    used_fixtures.fixtures_found(self._item, self._bring_fixtures),
                ):
                    self.device.restart_collector()
                    with process_kept():
                        yield
                self.device.end_body()
            finally:
                self._in_body = False

    def _passed(self) -> bool:
        # unittest's failures do not reach pytest as exceptions: the item collects them.
        return not self._subtest_failed and not getattr(self._item, "_excinfo", None)

    def _write_snapshot(self) -> None:
        self._note(self._snapshot())

    def _snapshot(self) -> str | None:
        """Write the artifact if it is requested; return the sentence on it."""
        if self._settings.artifacts is None or self._record is None:
            return None
        try:
            path = write_snapshot(self._settings.artifacts, self._item.nodeid)
        except OSError as error:
            return (
                f"{self._item.nodeid}: its snapshot cannot be written: {error.strerror or error}; "
                "give --gpumem-artifacts a folder that can be written"
            )
        return f"{self._item.nodeid}: its snapshot is {path}"

    def note(self, sentence: str) -> None:
        """Add ``sentence`` to the notes of the measurement."""
        self._note(sentence)

    def _note(self, sentence: str | None) -> None:
        record = self._record
        if sentence is not None and record is not None and record.measurement is not None:
            notes = (*record.measurement.notes, sentence)
            self._record = replace(record, measurement=replace(record.measurement, notes=notes))

    def _finish(self, *, passed: bool) -> None:
        measured = self._measured(passed=passed)
        own = measured.pop(f"cuda:{self.device.index}")
        others = tuple(other for other in measured.values() if other.peak_allocated > 0)
        self._take(own, others, passed=passed and not self._among_ranks)
        if not passed:
            self._write_snapshot()

    def _take(
        self, own: Measurement, others: Sequence[Measurement], *, passed: bool, ranks: str = ""
    ) -> None:
        self._record = self._judge.record(
            self._item.nodeid,
            self._expectation,
            self.device,
            own,
            others,
            passed=passed,
            predicted=self._predicted,
            ranks=ranks,
        )
        if self._record is not None:
            set_user_properties(self._item.user_properties, self._record)

    def _measured(self, *, passed: bool) -> dict[str, Measurement]:
        """Return the measurements of the last run, by device."""
        fixtures = used_fixtures.fixtures_of(self._item)
        found = self._meter.measurements(
            fixtures,
            values_given(values_of(fixtures), self._item),
            device=self.device.index,
            passed=passed,
            max_leak=self._expectation.max_leak if self._expectation else None,
        )
        completed = map(self.device.complete, found.values())
        measured = {measurement.device: measurement for measurement in completed}
        own = f"cuda:{self.device.index}"
        measured[own] = replace(measured[own], expected=dict(self._expected.categories))
        return measured


def _account(recorder: Recorder, item: pytest.Item, settings: Settings, hooks: Hooks) -> Account:
    return Account(
        recorder,
        str(item.config.rootpath),
        timelines=any(target.kind == "html" for target in settings.reports),
        classify=hooks.classify_for(item),
        locate=hooks.locate_for(item),
    )
