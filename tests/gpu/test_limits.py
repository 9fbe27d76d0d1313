"""Limits of peak, reserved memory, phases and leaks, to the byte."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import CudaProject

LIMITS = """
    kept = []

    def allocate(mib):
        return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpumem(max="4MiB")
    def test_peak():
        allocate(4)

    @pytest.mark.gpumem(max=(4 << 20) - 1)
    def test_peak_too_high():
        allocate(4)

    @pytest.mark.gpumem(max_reserved="19MiB")
    def test_reserved_too_high():
        allocate(4)

    @pytest.mark.gpumem(phases={"load": "1MiB"})
    def test_phase_too_high(gpumem):
        with gpumem.phase("load"):
            allocate(2)
        assert gpumem.phases["load"].peak_allocated == 2 << 20

    @pytest.mark.gpumem(phases={"outer": "3MiB"})
    def test_nested(gpumem):
        with gpumem.phase("outer"):
            one = allocate(1)
            with gpumem.phase("inner"):
                allocate(2)
        assert gpumem.phases["inner"].peak_allocated == 3 << 20

    @pytest.mark.gpumem(max_leak=0)
    def test_leak():
        kept.append(torch.empty(600, dtype=torch.uint8, device="cuda"))

    @pytest.mark.gpumem(max_leak=0)
    def test_no_leak():
        cycle = [allocate(1)]
        cycle.append(cycle)
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
"""

SENTENCES = {
    "test_peak_too_high": "the test peaked at 4.0 MiB (4,194,304 B), 1 B over its limit of *",
    "test_phase_too_high": "load peaked at 2.0 MiB (2,097,152 B), 1.0 MiB over its limit of *",
    "test_leak": "1.0 KiB (1,024 B) still allocated after the test, 1.0 KiB over its limit of 0 B*",
}


def test_tests_over_their_limit_fail(cuda: CudaProject) -> None:
    cuda.write(test_limits=LIMITS)

    outcomes = {name: record["outcome"] for name, record in cuda.records().items()}

    failed = {"test_peak_too_high", "test_reserved_too_high", "test_phase_too_high", "test_leak"}
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == failed
    assert {name for name, outcome in outcomes.items() if outcome == "passed"} == {
        "test_peak",
        "test_nested",
        "test_no_leak",
    }


@pytest.mark.parametrize("name", SENTENCES)
def test_a_failure_is_reported_in_one_sentence(cuda: CudaProject, name: str) -> None:
    cuda.write(test_limits=LIMITS)

    result = cuda.run("-k", name.removeprefix("test_"))

    result.stdout.fnmatch_lines([SENTENCES[name]])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*simulated*")


def test_a_test_that_allocates_nothing_fails(cuda: CudaProject) -> None:
    cuda.write(test_nothing="@pytest.mark.gpumem\ndef test_on_the_cpu():\n    torch.ones(3)\n")

    result = cuda.run()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["nothing was measured*"])
