from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_gpumem.baseline.verdict import (
    Improvement,
    Verdict,
    failure_text,
    format_percent,
    main_verdict,
    update_command,
)

MIB = 1024**2
NODEID = "tests/test_model.py::test_step"

BASELINE: dict[str, Any] = {
    "kind": "baseline",
    "metric": "peak_allocated",
    "phase": "forward",
    "limit": 1_321_571_379,
    "actual": 1_739_461_632,
    "reference": 1_307_448_320,
    "passed": False,
    "tolerance": "1% + 1MiB",
}
LIMIT: dict[str, Any] = {
    "kind": "limit",
    "metric": "peak_allocated",
    "phase": None,
    "limit": 100 * MIB,
    "actual": 130 * MIB,
    "reference": None,
    "passed": False,
}


def verdict(base: dict[str, Any], **changes: Any) -> Verdict:
    return Verdict(**{**base, **changes})


def long(verdict: Verdict) -> str:
    return failure_text([verdict], update_command(NODEID))


def test_a_regression_reads_as_the_guide_shows_it() -> None:
    explanation: tuple[dict[str, Any], ...] = (
        {
            "bytes": 384 * MIB,
            "change": "new",
            "category": "activations",
            "site": "model/attention.py:71",
            "operator": "torch.softmax",
            "module": "attention",
            "count": 12,
            "shape": [8, 12, 256, 256],
            "dtype": "float32",
        },
        {
            "bytes": 28 * MIB,
            "change": "grown",
            "category": "workspace",
            "site": None,
            "operator": "cuBLAS",
            "module": None,
            "count": 1,
            "shape": None,
            "dtype": None,
        },
    )
    assert long(verdict(BASELINE, explanation=explanation)) == (
        "forward peaked at 1.62 GiB (1,739,461,632 B), 412.0 MiB over its baseline of 1.22 GiB "
        "(+33.0 %, tolerance 1% + 1MiB)\n"
        "  +384.0 MiB  activations  model/attention.py:71  torch.softmax"
        "  12 × 32.0 MiB float32 (new)\n"
        "  + 28.0 MiB  workspace    cuBLAS                              "
        "  1 × 28.0 MiB\n"
        'accept it: pytest --gpumem-update-baselines "tests/test_model.py::test_step"'
    )


def test_the_short_text_is_the_first_line_of_the_long_text() -> None:
    for base in (BASELINE, LIMIT):
        assert long(verdict(base)).splitlines()[0] == verdict(base).short


def test_shrinking_sites_have_a_sign_and_the_rest_is_summed_up() -> None:
    explanation = [{"bytes": -8 * MIB, "change": "gone", "category": "inputs", "count": 2}]
    explanation += [{"bytes": 512, "change": "grown", "category": "other", "count": 1}] * 11
    lines = long(verdict(BASELINE, explanation=tuple(explanation))).splitlines()
    assert lines[1] == "  -8.0 MiB  inputs  2 × 4.0 MiB (gone)"
    assert lines[2] == "  +  512 B  other   1 × 512 B"
    assert len(lines) == 13
    assert lines[11] == "  +1.0 KiB in 2 smaller changes"


def test_an_exceeded_limit_shows_its_excess_and_offers_no_update() -> None:
    assert long(verdict(LIMIT)) == (
        "the test peaked at 130.0 MiB (136,314,880 B), 30.0 MiB over its limit of 100.0 MiB"
    )


def test_reserved_and_leaked_bytes_have_their_own_words() -> None:
    assert verdict(LIMIT, metric="peak_reserved").short == (
        "the test reserved 130.0 MiB (136,314,880 B), 30.0 MiB over its limit of 100.0 MiB"
    )
    assert verdict(LIMIT, kind="leak", metric="leaked", limit=0, actual=2048).short == (
        "2.0 KiB (2,048 B) still allocated after the test, 2.0 KiB over its limit of 0 B"
    )


def test_a_passed_verdict_reads_as_passed() -> None:
    assert verdict(LIMIT, actual=100 * MIB, passed=True).short == (
        "the test peaked at 100.0 MiB (104,857,600 B), within its limit of 100.0 MiB"
    )
    same = verdict(BASELINE, actual=1_307_448_320, passed=True)
    assert long(same) == (
        "forward peaked at 1.22 GiB (1,307,448,320 B), equal to its baseline (tolerance 1% + 1MiB)"
    )


def test_a_reference_of_zero_has_no_percentage() -> None:
    grown = verdict(BASELINE, limit=0, actual=1024, reference=0, tolerance="0")
    assert grown.short == (
        "forward peaked at 1.0 KiB (1,024 B), 1.0 KiB over its baseline of 0 B (tolerance 0)"
    )


@pytest.mark.parametrize(
    ("change", "reference", "text"),
    [
        (412, 1_000, "+41.2 %"),
        (-250, 1_000, "-25.0 %"),
        (512, 1_307_448_320, "+<0.1 %"),
        (-512, 1_307_448_320, "-<0.1 %"),
        (0, 1_000, "+0.0 %"),
    ],
)
def test_a_change_has_a_percentage_of_its_reference(change: int, reference: int, text: str) -> None:
    assert format_percent(change, reference) == text


def test_a_simulated_number_and_another_device_are_named() -> None:
    simulated = {"simulated": True, "gpu": "A100-40GB"}
    assert verdict(LIMIT, **simulated).short.endswith("100.0 MiB [simulated A100-40GB]")
    assert verdict(LIMIT, **simulated, device="cuda:1").short.endswith(
        " [simulated A100-40GB, cuda:1]"
    )
    assert verdict(LIMIT, gpu="NVIDIA H100").short.endswith("100.0 MiB")


def test_a_missing_baseline_names_the_command_to_run() -> None:
    note = "none is stored for sim-T4-torch2.13; stored elsewhere: sim-A10-torch2.13 1.22 GiB"
    missing = verdict(BASELINE, phase=None, limit=None, reference=None, notes=(note,))
    assert long(missing) == (
        "the test peaked at 1.62 GiB (1,739,461,632 B) and has no baseline to match; "
        "none is stored for sim-T4-torch2.13; stored elsewhere: sim-A10-torch2.13 1.22 GiB\n"
        'record it: pytest --gpumem-update-baselines "tests/test_model.py::test_step"'
    )


def test_a_phase_that_did_not_run_is_named_with_its_expectation() -> None:
    notes = ("phases that ran: backward",)
    assert long(verdict(BASELINE, actual=0, notes=notes)) == (
        "phase forward did not run, so its baseline of 1.22 GiB was not checked; "
        "phases that ran: backward\n"
        'accept it: pytest --gpumem-update-baselines "tests/test_model.py::test_step"'
    )
    assert long(verdict(LIMIT, phase="step", actual=0)) == (
        "phase step did not run, so its limit of 100.0 MiB was not checked"
    )


def test_nothing_measured_names_the_cause_and_the_remedies() -> None:
    nothing = verdict(LIMIT, kind="nothing_measured", limit=None, actual=0)
    assert long(nothing) == (
        "nothing was measured, because the test allocated nothing on cuda:0; the usual cause is "
        '`device = "cuda" if torch.cuda.is_available() else "cpu"` at import: ask `gpumem.device` '
        "inside the test"
    )
    simulated = verdict(
        LIMIT, kind="nothing_measured", limit=None, actual=0, simulated=True, gpu="T4"
    )
    assert simulated.short.endswith(
        "inside the test, or run with --gpumem-sim-scope=session [simulated T4]"
    )


def test_an_improvement_shows_its_distance_from_the_baseline() -> None:
    improvement = Improvement("peak_allocated", None, 75 * MIB, 100 * MIB, "0", simulated=True)
    assert improvement.short == (
        "the test peaked at 75.0 MiB (78,643,200 B), 25.0 MiB under its baseline of 100.0 MiB "
        "(-25.0 %, tolerance 0) [simulated]"
    )


def test_the_command_survives_a_shell_and_repeats_options() -> None:
    assert update_command('t.py::test_x[a"$b`\\]', "pytest --gpumem-device=sim:T4") == (
        'pytest --gpumem-device=sim:T4 --gpumem-update-baselines "t.py::test_x[a\\"\\$b\\`\\\\]"'
    )


def test_verdicts_survive_a_round_trip_through_json() -> None:
    full = verdict(
        BASELINE, explanation=({"bytes": 1, "change": "new", "category": "other"},), notes=("n",)
    )
    assert Verdict.from_dict(json.loads(json.dumps(full.to_dict()))) == full
    improvement = Improvement("peak_allocated", "forward", 1, 2, "0", "cuda:1", True, "T4")
    assert Improvement.from_dict(json.loads(json.dumps(improvement.to_dict()))) == improvement


@pytest.mark.parametrize(
    ("limit", "written", "actual", "text"),
    [
        (
            *(300_000, "300KB", 300_032),
            "the test peaked at 293.00 KiB (300,032 B), 32 B over its limit of 292.97 KiB "
            "(300,000 B)",
        ),
        (
            *(1024**3, "1 GiB", 1024**3 + 4096),
            "the test peaked at 1.00 GiB (1,073,745,920 B), 4.0 KiB over its limit of 1 GiB",
        ),
        (
            *(4_194_303, "", 4_194_304),
            "the test peaked at 4.0 MiB (4,194,304 B), 1 B over its limit of 4,194,303 B",
        ),
        # A number of bytes without an exact short form.
        (
            *(3_000_000, "", 4_194_304),
            "the test peaked at 4.0 MiB (4,194,304 B), 1.1 MiB over its limit of 2.9 MiB "
            "(3,000,000 B)",
        ),
    ],
)
def test_a_limit_reads_as_it_is_written(limit: int, written: str, actual: int, text: str) -> None:
    one = verdict(LIMIT, limit=limit, written=written, actual=actual)
    assert one.short == text


@pytest.mark.parametrize(
    ("base", "changes", "brief"),
    [
        (BASELINE, {}, "forward +412.0 MiB over baseline"),
        (BASELINE, {"phase": None, "kind": "prediction"}, "+412.0 MiB over prediction"),
        (LIMIT, {"written": "100MiB"}, "+30.0 MiB over 100MiB"),
        (LIMIT, {"metric": "peak_reserved"}, "reserved +30.0 MiB over 100.0 MiB"),
        (LIMIT, {"metric": "leaked", "limit": 0, "actual": 2048}, "left 2.0 KiB behind"),
        (LIMIT, {"phase": "step", "actual": 0}, "phase step did not run"),
        (BASELINE, {"limit": None, "reference": None}, "forward no baseline to match"),
        (LIMIT, {"kind": "nothing_measured", "limit": None}, "nothing was measured"),
    ],
)
def test_the_short_summary_has_a_few_words(
    base: dict[str, Any], changes: dict[str, Any], brief: str
) -> None:
    assert verdict(base, **changes).brief == brief


def test_of_equal_excesses_the_comparison_represents_the_failure() -> None:
    grown = verdict(BASELINE, phase=None, limit=8 * MIB, actual=12 * MIB, reference=8 * MIB)
    left = verdict(LIMIT, kind="leak", metric="leaked", limit=0, actual=4 * MIB)
    assert main_verdict([left, grown]) is grown
    assert main_verdict([grown, left]) is grown
