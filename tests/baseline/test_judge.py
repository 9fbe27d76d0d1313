from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pytest_gpumem.baseline.compare import Judgement, default_tolerance_for, judge, missing_text
from pytest_gpumem.baseline.store import BaselineEntry
from pytest_gpumem.baseline.verdict import Improvement, Verdict
from pytest_gpumem.marker import Expectation
from pytest_gpumem.sizes import Tolerance
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement, PhaseRecord

MIB = 1024**2
T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")
A10 = Environment(simulated=True, gpu="A10", compute_capability="8.6", torch="2.13")


def measured(peak: int, *, simulated: bool = True, **changes: Any) -> Measurement:
    phases = changes.pop("phases", {})
    values: dict[str, Any] = {
        "device": "cuda:0",
        "simulated": simulated,
        "peak_allocated": peak,
        "peak_reserved": 20 * MIB,
        "allocated_before": 0,
        "allocated_after": 0,
        "leaked": 0,
        "cublas_workspace": 0,
        "phases": {name: PhaseRecord(name, size, 0, 0, 0) for name, size in phases.items()},
    }
    return Measurement(**{**values, **changes})


def stored(peak: int, **phases: int) -> BaselineEntry:
    return BaselineEntry(peak, 20 * MIB, 0, 0, phases)


def judged(
    measurement: Measurement,
    expectation: Expectation | None = None,
    baseline: BaselineEntry | None = None,
    **options: Any,
) -> Judgement:
    return judge(
        expectation or Expectation(), measurement, baseline=baseline, environment=T4, **options
    )


def broken(judgement: Judgement) -> list[Verdict]:
    return [verdict for verdict in judgement.verdicts if not verdict.passed]


def failures(judgement: Judgement) -> list[tuple[str, str, str | None]]:
    return [(verdict.kind, verdict.metric, verdict.phase) for verdict in broken(judgement)]


def test_a_test_without_expectation_passes_as_without_baseline() -> None:
    assert judged(measured(512)) == Judgement((), (), missing_baseline=True)


@pytest.mark.parametrize(("peak", "passed"), [(1000, True), (1001, False)])
def test_a_peak_equal_to_the_limit_passes(peak: int, passed: bool) -> None:
    (verdict,) = judged(measured(peak), Expectation(max=1000)).verdicts
    assert (verdict.kind, verdict.limit, verdict.actual, verdict.passed) == (
        "limit",
        1000,
        peak,
        passed,
    )
    assert verdict.reference is None
    assert (verdict.simulated, verdict.gpu, verdict.device) == (True, "T4", "cuda:0")


def test_a_limit_of_zero_is_judged() -> None:
    judgement = judged(measured(512, leaked=512), Expectation(max=0, max_reserved=0, max_leak=0))
    assert failures(judgement) == [
        ("limit", "peak_allocated", None),
        ("limit", "peak_reserved", None),
        ("leak", "leaked", None),
    ]


def test_reserved_bytes_have_their_own_limit() -> None:
    assert not broken(judged(measured(512), Expectation(max_reserved=20 * MIB)))
    assert failures(judged(measured(512), Expectation(max_reserved=20 * MIB - 1))) == [
        ("limit", "peak_reserved", None)
    ]


def test_each_phase_has_its_limit() -> None:
    measurement = measured(3000, phases={"forward": 2000, "backward": 3000})
    judgement = judged(measurement, Expectation(phases={"forward": 2000, "backward": 2999}))
    assert [verdict.passed for verdict in judgement.verdicts] == [True, False]
    assert failures(judgement) == [("limit", "peak_allocated", "backward")]


def test_a_limited_phase_that_did_not_run_fails_with_those_that_did() -> None:
    measurement = measured(3000, phases={"forward": 2000, "backward": 3000})
    (verdict,) = broken(judged(measurement, Expectation(phases={"fwd": 4000})))
    assert verdict.short == (
        "phase fwd did not run, so its limit of 3.9 KiB was not checked; "
        "phases that ran: forward, backward [simulated T4]"
    )
    (verdict,) = broken(judged(measurement, Expectation(phases={"backwrad": 4000})))
    assert "; did you mean backward? phases that ran: forward, backward [" in verdict.short
    (verdict,) = broken(judged(measured(3000), Expectation(phases={"fwd": 4000})))
    assert "phases that ran: none" in verdict.short


def test_a_phase_limit_of_the_project_does_not_require_the_phase() -> None:
    project = {"forward": 1000}
    expectation = Expectation(phases=project)
    assert not judged(measured(3000), expectation, default_phases=project).verdicts
    over = measured(3000, phases={"forward": 1001})
    assert failures(judged(over, expectation, default_phases=project)) == [
        ("limit", "peak_allocated", "forward")
    ]


@pytest.mark.parametrize(
    ("leaked", "expected"), [(512, [True]), (513, [False]), (-512, [True]), (None, [])]
)
def test_a_leak_is_judged_only_where_it_was_measured(
    leaked: int | None, expected: list[bool]
) -> None:
    judgement = judged(measured(1024, leaked=leaked), Expectation(max_leak=512))
    assert [verdict.passed for verdict in judgement.verdicts] == expected


def test_a_leak_without_a_limit_is_no_verdict() -> None:
    assert not judged(measured(1024, leaked=1024)).verdicts


@pytest.mark.parametrize(
    ("peak", "passed", "improved"),
    [(10_000, True, False), (10_001, False, False), (9_999, True, True)],
)
def test_simulated_numbers_must_be_exactly_their_baseline(
    peak: int, passed: bool, improved: bool
) -> None:
    judgement = judged(measured(peak), baseline=stored(10_000))
    (verdict,) = judgement.verdicts
    assert (verdict.limit, verdict.reference, verdict.tolerance) == (10_000, 10_000, "0")
    assert verdict.passed is passed
    assert bool(judgement.improvements) is improved
    assert not judgement.missing_baseline


# 1 % of 200 MiB is 2 MiB, and 1 MiB more.
@pytest.mark.parametrize(
    ("peak", "passed", "improved"),
    [
        (203 * MIB, True, False),
        (203 * MIB + 1, False, False),
        (197 * MIB, True, False),
        (197 * MIB - 1, True, True),
    ],
)
def test_measured_numbers_may_differ_by_one_per_cent_and_one_mib(
    peak: int, passed: bool, improved: bool
) -> None:
    judgement = judged(measured(peak, simulated=False), baseline=stored(200 * MIB))
    (verdict,) = judgement.verdicts
    assert (verdict.limit, verdict.tolerance) == (203 * MIB, "1% + 1MiB")
    assert verdict.passed is passed
    assert bool(judgement.improvements) is improved


def test_the_test_s_tolerance_wins_over_the_default() -> None:
    own, exact = (Expectation(tolerance=Tolerance(0.0, floor)) for floor in (100, 0))
    (verdict,) = judged(measured(1000, simulated=False), own, stored(1000)).verdicts
    assert verdict.limit == 1100
    (verdict,) = judged(measured(1000, simulated=False), exact, stored(1000)).verdicts
    assert verdict.limit == 1000


def test_each_common_phase_is_compared_and_a_new_one_passes() -> None:
    measurement = measured(5000, phases={"forward": 3000, "backward": 5000, "step": 9999})
    judgement = judged(measurement, baseline=stored(5000, forward=2999, backward=5001))
    assert failures(judgement) == [("baseline", "peak_allocated", "forward")]
    assert [verdict.phase for verdict in judgement.verdicts] == [None, "forward", "backward"]
    assert judgement.improvements == (
        Improvement("peak_allocated", "backward", 5000, 5001, "0", "cuda:0", True, "T4"),
    )


def test_a_phase_of_the_baseline_that_no_longer_runs_fails() -> None:
    measurement = measured(5000, phases={"forward": 1})
    loose = Expectation(tolerance=Tolerance(0.0, 100))
    (verdict,) = broken(judged(measurement, loose, stored(5000, backward=4096)))
    assert (verdict.phase, verdict.actual, verdict.reference) == ("backward", 0, 4096)
    assert (verdict.limit, verdict.tolerance) == (4196, "100B")
    assert verdict.short == (
        "phase backward did not run, so its baseline of 4.0 KiB was not checked; "
        "phases that ran: forward [simulated T4]"
    )


def test_a_baseline_phase_of_zero_bytes_must_run_too() -> None:
    (verdict,) = broken(judged(measured(512), baseline=stored(512, forward=0)))
    assert verdict.short.startswith("phase forward did not run, so its baseline of 0 B")


def test_a_baseline_of_zero_is_allowed_only_the_floor() -> None:
    measurement = measured(512, simulated=False, phases={"forward": MIB + 1, "freed": 0, "gone": 0})
    judgement = judged(measurement, baseline=stored(512, forward=0, freed=-4096, missing=-2 * MIB))
    assert [(verdict.phase, verdict.limit) for verdict in judgement.verdicts] == [
        (None, 512 + 5 + MIB),
        ("forward", MIB),
        ("freed", MIB - 4096),
        ("missing", 0),
    ]
    assert failures(judgement) == [
        ("baseline", "peak_allocated", "forward"),
        ("baseline", "peak_allocated", "missing"),
    ]


def test_without_a_baseline_only_a_test_that_says_baseline_true_fails() -> None:
    for expectation in (Expectation(), Expectation(baseline=False)):
        assert not broken(judged(measured(512), expectation))
    judgement = judged(measured(512), Expectation(baseline=True), elsewhere=[(A10, stored(MIB))])
    (verdict,) = broken(judgement)
    assert judgement.missing_baseline
    assert (verdict.kind, verdict.limit, verdict.reference) == ("baseline", None, None)
    assert verdict.short == (
        "the test peaked at 512 B and has no baseline to match; "
        "none is stored for sim-T4-torch2.13; "
        "stored elsewhere: sim-A10-torch2.13 1.0 MiB [simulated T4]"
    )


def test_required_baselines_must_exist_unless_the_test_says_false() -> None:
    assert failures(judged(measured(512), require_baseline=True)) == [
        ("baseline", "peak_allocated", None)
    ]
    judgement = judged(measured(512), Expectation(baseline=False), require_baseline=True)
    assert judgement == Judgement()


def test_baseline_false_is_never_compared() -> None:
    assert judged(measured(512), Expectation(baseline=False), stored(1)) == Judgement()


def test_baselines_of_other_environments_are_shown_and_not_compared() -> None:
    judgement = judged(measured(5000), elsewhere=[(A10, stored(1))])
    assert not judgement.verdicts
    assert missing_text(T4, []) == "none is stored for sim-T4-torch2.13"
    assert missing_text(T4, [(A10, stored(MIB)), (T4, stored(512))]) == (
        "none is stored for sim-T4-torch2.13; stored elsewhere: "
        "sim-A10-torch2.13 1.0 MiB, sim-T4-torch2.13 512 B"
    )


def test_an_update_of_all_baselines_compares_and_misses_none() -> None:
    strict = Expectation(baseline=True, max=100)
    changed = judged(measured(5000), strict, stored(1000), update="all")
    assert failures(changed) == [("limit", "peak_allocated", None)]
    assert not judged(measured(500), None, stored(1000), update="all").improvements
    missing = judged(measured(50), strict, update="all", require_baseline=True)
    assert not broken(missing)
    assert missing.missing_baseline


def test_an_update_of_new_baselines_compares_the_existing_ones() -> None:
    assert not broken(judged(measured(50), Expectation(baseline=True), update="new"))
    assert failures(judged(measured(50), None, stored(40), update="new")) == [
        ("baseline", "peak_allocated", None)
    ]


def test_a_positive_peak_is_measured_and_a_negative_one_is_nothing() -> None:
    assert not broken(judged(measured(1)))
    assert failures(judged(measured(-512))) == [("nothing_measured", "peak_allocated", None)]


def test_nothing_measured_excludes_other_verdicts() -> None:
    everything = Expectation(max=1, max_leak=0, phases={"forward": 1}, baseline=True)
    judgement = judged(measured(0), everything, stored(1000, forward=10), require_baseline=True)
    assert failures(judgement) == [("nothing_measured", "peak_allocated", None)]
    assert not judgement.improvements
    assert not judgement.missing_baseline


def test_a_device_without_memory_passes_where_another_was_used() -> None:
    judgement = judged(measured(0), Expectation(max=1, baseline=False), used_elsewhere=True)
    assert [verdict.passed for verdict in judgement.verdicts] == [True]


def test_default_tolerances_of_real_and_simulated_devices() -> None:
    assert str(default_tolerance_for(exact=True)) == "0"
    assert str(default_tolerance_for(exact=False)) == "1% + 1MiB"


def test_judging_needs_neither_torch_nor_nvml_nor_jsonschema() -> None:
    code = (
        "import sys, pytest_gpumem.baseline.compare, pytest_gpumem.baseline.update\n"
        "print(sorted({'torch', 'pynvml', 'jsonschema'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
