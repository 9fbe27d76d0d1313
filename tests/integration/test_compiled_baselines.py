"""A number of eager code is never taken for one of compiled code."""

from __future__ import annotations

import pytest

SIMULATED = ("-q", "--gpumem-device=sim:A100-40GB", "-p", "no:randomly")


@pytest.fixture
def gate(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile("""
        import pytest, torch

        @pytest.mark.gpumem(tolerance="1GB")
        def test_gate():
            gate = torch.compile(lambda x: x.sigmoid() * x.tanh() * x.cos())
            gate(torch.ones(1024, 1024, device="cuda"))
    """)
    return pytester


def test_a_baseline_of_compiled_code_is_not_met_by_eager_code(gate: pytest.Pytester) -> None:
    gate.runpytest_subprocess(*SIMULATED, "--gpumem-update-baselines").assert_outcomes(passed=1)
    result = gate.runpytest_subprocess(*SIMULATED, "--gpumem-sim-compile=eager")
    result.assert_outcomes(failed=1)
    said = " ".join(result.stdout.str().split())
    assert "compiled code ran eagerly, so what it allocates says nothing of its baseline" in said


def test_a_baseline_of_eager_code_is_and_quiet_runs_say_that_it_is_eager(
    gate: pytest.Pytester,
) -> None:
    eager = (*SIMULATED, "--gpumem-sim-compile=eager")
    gate.runpytest_subprocess(*eager, "--gpumem-update-baselines").assert_outcomes(passed=1)
    result = gate.runpytest_subprocess(*eager)
    result.assert_outcomes(passed=1)
    said = " ".join(result.stdout.str().split())
    assert "runs eagerly on a simulated GPU, as it was asked to" in said
    assert said.count("note: torch.compile at") == 1
