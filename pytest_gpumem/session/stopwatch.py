"""The durations of tests and the number of tests beside them: the data kept for later runs.

Every project with the plugin installed pays for this module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.report.record import TestRecord
    from pytest_gpumem.sharing.learned import Learned

BESIDE = "gpumem_beside"
"""Attribute of a teardown's report: the number of other tests on its devices while it ran."""

Run = tuple[str, str]
"""A test by its id, and the worker where several run all of them."""


class Stopwatch:
    """The durations of tests, and the number of tests beside them."""

    def __init__(self) -> None:
        self._seconds: dict[Run, float] = {}
        self._beside: dict[Run, int] = {}
        self._workers: set[str] = set()
        self._passed: set[Run] = set()

    def take(self, run: Run, report: pytest.TestReport) -> None:
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
        if report.when == "teardown" and hasattr(report, BESIDE):
            self._beside[run] = getattr(report, BESIDE)

    def timed(self, run: Run, record: TestRecord) -> TestRecord:
        """Return ``record`` with the whole test's duration, and the number of others beside it."""
        seconds = self._seconds.get(run)
        if seconds is None:
            return record
        return replace(record, duration=round(seconds, 6), beside=self._beside.get(run))

    def lessons(self, records: Mapping[Run, TestRecord]) -> Learned:
        """Return the data to keep of the tests that passed; ``records`` are of the measured."""
        from pytest_gpumem.sharing.learned import NO_DEVICE, Learned, Lesson

        learned = Learned()
        for run in self._passed:
            record = records.get(run)
            seconds = round(self._seconds[run], 3)
            if record is None:
                learned.learn(NO_DEVICE, run[0], Lesson(seconds=seconds))
            elif record.measurement is not None:
                own = seconds if self._was_alone(run, record) else None
                lesson = Lesson(seconds=own, reserved=reserved_by(record))
                learned.learn(record.environment.key, run[0], lesson)
        return learned

    def _was_alone(self, run: Run, record: TestRecord) -> bool:
        """Return whether nothing else is known to have computed on the test's device."""
        beside = self._beside.get(run)
        if beside is not None or record.environment.is_exact:
            return not beside
        # Several workers without a shared gate may each have been beside the others.
        return len(self._workers) < 2 and (record.nvml or {}).get("alone") is not False


def reserved_by(record: TestRecord) -> int | None:
    """Return the most bytes that a test reserved of its device."""
    measured = record.measurement
    return None if measured is None else max(measured.peak_reserved, measured.peak_allocated, 0)
