"""All data of one test for the reports, which workers send, and its properties in JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pytest_gpumem.baseline.store import split_nodeid
from pytest_gpumem.baseline.verdict import Improvement, Verdict, main_verdict
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.serialization import OMITTED, Plain


@dataclass(frozen=True)
class TestRecord(Plain):
    """A test that ran, with its expectation, measurement and verdicts; sizes in bytes."""

    __test__: ClassVar[bool] = False  # pytest would take the name for a test class

    nodeid: str
    outcome: str
    """pytest's outcome: ``passed``, ``failed``, ``error``, ``skipped``, ``xfailed`` or ``xpassed``.

    Never ``rerun``: only the last run of a test is reported.
    """
    environment: Environment
    measurement: Measurement | None
    """Measurement of the judged device; ``None`` where nothing could be measured."""
    other_devices: tuple[Measurement, ...] = ()
    """Measurements of every further device that the test touched."""
    expectation: Mapping[str, Any] = field(default_factory=dict)
    baseline: Mapping[str, Any] | None = None
    """The stored entry of this environment, ``None`` where there is none."""
    prediction: Mapping[str, Any] | None = None
    verdicts: tuple[Verdict, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    missing_baseline: bool = False
    """Whether a baseline was wanted and this environment has none."""
    judged: bool = True
    """``False`` where the test was only measured, or its body failed before a verdict."""
    out_of_memory: Mapping[str, Any] | None = field(default=None, metadata=OMITTED)
    """Data on a body that ran out of memory: the request and the holders of memory."""
    sharing: Mapping[str, Any] | None = field(default=None, metadata=OMITTED)
    """Data on the test's shared device: its need, its waiting time and borrowed bytes."""
    duration: float | None = field(default=None, metadata=OMITTED)
    """Seconds of set-up, call and teardown, without waiting for a shared device."""
    beside: int | None = field(default=None, metadata=OMITTED)
    """Number of other tests on its shared device during its run, which make it slower."""
    nvml: Mapping[str, Any] | None = field(default=None, metadata=OMITTED)
    """A device-level reading, or the reason why it failed; ``None`` without an attempt."""

    @property
    def broken(self) -> tuple[Verdict, ...]:
        """The verdicts that did not pass."""
        return tuple(verdict for verdict in self.verdicts if not verdict.passed)

    @property
    def ran_out(self) -> bool:
        """Whether it failed because memory ran out."""
        return self.out_of_memory is not None and self.outcome in ("failed", "error")

    @property
    def missing(self) -> int:
        """The bytes that it lacked when memory ran out."""
        facts = self.out_of_memory or {"requested": 0, "free": 0}
        return max(int(facts["requested"]) - int(facts["free"]), 0)

    @property
    def peak(self) -> int:
        """The peak of its measurement in bytes, 0 without one."""
        return self.measurement.peak_allocated if self.measurement else 0

    @property
    def key(self) -> tuple[str, str]:
        """The key of this test in every run: the environment's key, and the node id."""
        return self.environment.key, "::".join(split_nodeid(self.nodeid))

    @property
    def is_whole(self) -> bool:
        """Whether its numbers cover the whole body, which has not failed."""
        return self.outcome in ("passed", "xpassed") or bool(self.broken)

    @property
    def failed(self) -> bool:
        """Whether the test failed by its memory; ``False`` where that was expected (xfail)."""
        return self.outcome == "failed" and bool(self.broken)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The measurements of all devices, the judged one first."""
        return (() if self.measurement is None else (self.measurement,)) + self.other_devices


@dataclass(frozen=True)
class ReportedRun:
    """The input of a report."""

    records: Sequence[TestRecord]
    root: Path
    """The folder to which the files of tests are relative."""
    lines: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """File and line of each test by node id; the first line is 1."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """The reason why a test could not be simulated, by node id."""
    usage: Sequence[Mapping[str, Any]] = ()
    """The use of shared devices, as in the JSON report."""
    command: str = "pytest"
    """pytest's command line, with the options that baselines depend on."""


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

    pytest keeps the list, and with it the properties of a failed run, when a test runs again.
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
