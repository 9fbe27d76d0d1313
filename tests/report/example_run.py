"""A small run with one test of every kind, in round numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpumem.baseline.verdict import Improvement, Verdict
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement, PhaseRecord

MIB = 1024**2
SIMULATED = Environment(True, "A100-40GB", "8.0", "2.13")
REAL = Environment(False, "NVIDIA H200", "9.0", "2.13", cuda="12.8", driver="570.86.15")


def phase(name: str, peak: int, parent: str | None = None, **numbers: int) -> PhaseRecord:
    values: dict[str, Any] = {
        "peak_reserved": 96 * MIB,
        "allocated_before": 0,
        "allocated_after": 8 * MIB,
    }
    return PhaseRecord(name, peak, parent=parent, **{**values, **numbers})


def measured(
    peak: int,
    *phases: PhaseRecord,
    device: str = "cuda:0",
    leaked: int | None = 0,
    workspace: int = 0,
    notes: tuple[str, ...] = (),
    composition: Mapping[str, int] | None = None,
) -> Measurement:
    return Measurement(
        device=device,
        simulated=True,
        peak_allocated=peak,
        peak_reserved=96 * MIB,
        allocated_before=0,
        allocated_after=8 * MIB,
        leaked=leaked,
        cublas_workspace=workspace,
        phases={one.name: one for one in phases},
        composition=composition or {},
        notes=notes,
    )


def verdict(
    kind: str,
    actual: int,
    limit: int | None,
    *,
    phase: str | None = None,
    reference: int | None = None,
    metric: str = "peak_allocated",
    device: str = "cuda:0",
    passed: bool | None = None,
) -> Verdict:
    return Verdict(
        kind=kind,
        metric=metric,
        phase=phase,
        limit=limit,
        actual=actual,
        reference=reference,
        passed=limit is not None and actual <= limit if passed is None else passed,
        tolerance="0" if reference is not None else "",
        device=device,
        simulated=True,
        gpu="A100-40GB",
    )


def record(
    nodeid: str,
    measurement: Measurement | None,
    *verdicts: Verdict,
    outcome: str = "passed",
    environment: Environment = SIMULATED,
) -> TestRecord:
    return TestRecord(nodeid, outcome, environment, measurement, verdicts=verdicts)


def failing() -> TestRecord:
    """Return a test whose ``forward`` is 16 MiB over its baseline; its own limit holds."""
    phases = (
        phase("call", 80 * MIB),
        phase("forward", 80 * MIB, "call"),
        phase("step", 40 * MIB, "call"),
    )
    return record(
        "tests/test_model.py::test_step",
        measured(80 * MIB, *phases, workspace=8_519_680),
        verdict("limit", 80 * MIB, 100 * MIB),
        verdict("baseline", 80 * MIB, 64 * MIB, phase="forward", reference=64 * MIB),
        outcome="failed",
    )


def passing(name: str = "test_small", peak: int = 3 * MIB) -> TestRecord:
    limit = verdict("limit", peak, 100 * MIB)
    return record(f"tests/test_model.py::{name}", measured(peak, phase("forward", peak)), limit)


def improved() -> TestRecord:
    better = Improvement(
        "peak_allocated", None, 20 * MIB, 30 * MIB, "0", "cuda:0", True, "A100-40GB"
    )
    base = verdict("baseline", 20 * MIB, 30 * MIB, reference=30 * MIB)
    return TestRecord(
        "tests/test_model.py::test_lean[a]",
        "passed",
        SIMULATED,
        measured(20 * MIB),
        verdicts=(base,),
        improvements=(better,),
    )


def unknown(nodeid: str = "tests/other/test_new.py::TestNew::test_one") -> TestRecord:
    return TestRecord(nodeid, "passed", SIMULATED, measured(512), missing_baseline=True)
