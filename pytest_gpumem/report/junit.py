"""The numbers as flat properties of a test: ``<property>`` in pytest's JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_gpumem.baseline.verdict import main_verdict
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.values.measurement import Measurement

PREFIX = "gpumem_"


def user_properties(record: TestRecord) -> list[tuple[str, object]]:
    """Return the properties of ``record`` as (name, value); sizes in bytes, values int or str.

    A further device's properties carry its name: ``gpumem_cuda1_peak_allocated``.
    """
    properties: list[tuple[str, object]] = [
        (f"{PREFIX}environment", record.environment.key),
        (f"{PREFIX}simulated", "yes" if record.environment.simulated else "no"),
    ]
    if record.measurement is not None:
        properties += _sizes(PREFIX, record.measurement)
    for measurement in record.other_devices:
        properties += _sizes(f"{PREFIX}{measurement.device.replace(':', '')}_", measurement)
    if record.judged:
        properties.append((f"{PREFIX}verdict", "failed" if record.broken else "passed"))
    if record.broken:
        first = main_verdict(record.broken)
        properties.append((f"{PREFIX}over", first.brief))
        properties += [(f"{PREFIX}cause", first.cause)] if first.cause else []
    return properties


def set_user_properties(existing: list[tuple[str, object]], record: TestRecord) -> None:
    """Put the properties of ``record`` into an item's list in place of an earlier run's.

    The list outlives a rerun of the test, and so do the properties of the run that failed.
    """
    existing[:] = [pair for pair in existing if not pair[0].startswith(PREFIX)]
    existing += user_properties(record)


def _sizes(prefix: str, measurement: Measurement) -> Iterator[tuple[str, object]]:
    yield f"{prefix}peak_allocated", measurement.peak_allocated
    yield f"{prefix}peak_reserved", measurement.peak_reserved
    yield f"{prefix}allocated_after", measurement.allocated_after
    if measurement.leaked is not None:
        yield f"{prefix}leaked", measurement.leaked
    yield f"{prefix}cublas_workspace", measurement.cublas_workspace
    for name, phase in measurement.phases.items():
        word = re.sub(r"\W+", "_", name)
        yield f"{prefix}phase_{word}_peak_allocated", phase.peak_allocated
