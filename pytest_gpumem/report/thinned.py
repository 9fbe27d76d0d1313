"""The time lines of a run of thousands of tests: whole for some, thinned for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_gpumem.attribution.timeline import thinned
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.values.measurement import Measurement

MOST_WHOLE = 50
"""Tests with a whole time line: those that failed first, then those with the highest peaks."""
SAMPLES = 24
"""Samples of the other tests' time lines."""


def thin(records: Sequence[TestRecord]) -> list[TestRecord]:
    """Return ``records`` with the time lines of all but :data:`MOST_WHOLE` tests thinned."""
    if sum(_has_line(record) for record in records) <= MOST_WHOLE:
        return list(records)
    ordered = sorted(records, key=lambda one: (one.outcome != "failed", -_peak(one)))
    whole = set(map(id, ordered[:MOST_WHOLE]))
    return [record if id(record) in whole else _thin(record) for record in records]


def _thin(record: TestRecord) -> TestRecord:
    own = record.measurement and _thin_measurement(record.measurement)
    others = tuple(map(_thin_measurement, record.other_devices))
    return replace(record, measurement=own, other_devices=others)


def _thin_measurement(measured: Measurement) -> Measurement:
    if measured.timeline is None:
        return measured
    return replace(measured, timeline=thinned(measured.timeline, SAMPLES))


def _has_line(record: TestRecord) -> bool:
    return any(measured.timeline is not None for measured in record.measurements)


def _peak(record: TestRecord) -> int:
    return record.measurement.peak_allocated if record.measurement else 0
