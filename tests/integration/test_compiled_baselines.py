"""Baselines of compiled code: unmet by eager code, and the same whatever ran before."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project


@pytest.fixture
def gate(project: Project) -> Project:
    project.write(
        test_gate="""
        @pytest.mark.gpumem(tolerance="1GB")
        def test_gate():
            gate = torch.compile(lambda x: x.sigmoid() * x.tanh() * x.cos())
            gate(torch.ones(1024, 1024, device="cuda"))
        """
    )
    return project


def run(project: Project, *args: str) -> pytest.RunResult:
    return project.run_apart("-q", *args, device="--gpumem-device=sim:A100-40GB")


def test_a_baseline_of_compiled_code_is_not_met_by_eager_code(gate: Project) -> None:
    run(gate, "--gpumem-update-baselines").assert_outcomes(passed=1)
    result = run(gate, "--gpumem-sim-compile=eager")
    result.assert_outcomes(failed=1)
    said = " ".join(result.stdout.str().split())
    assert "compiled code ran eagerly, so what it allocates says nothing of its baseline" in said


def test_a_baseline_of_eager_code_is_met_and_a_quiet_run_notes_it(
    gate: Project,
) -> None:
    eager = "--gpumem-sim-compile=eager"
    run(gate, eager, "--gpumem-update-baselines").assert_outcomes(passed=1)
    result = run(gate, eager)
    result.assert_outcomes(passed=1)
    said = " ".join(result.stdout.str().split())
    assert "runs eagerly on a simulated GPU, as it was asked to" in said
    assert said.count("note: torch.compile at") == 1


def test_a_test_allocates_the_same_after_other_sizes_were_compiled(
    project: Project,
) -> None:
    """Dynamo marks a size that changed as dynamic, and Inductor pads no dynamic product."""
    project.write(
        test_rows="""
        class Head(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x).float().softmax(-1)

        @pytest.mark.gpumem(tolerance="0")
        @pytest.mark.parametrize("rows", [512, 1024, 2048])
        def test_rows(rows):
            head = Head(768, 50257, bias=False, device="cuda", dtype=torch.bfloat16)
            x = torch.ones(rows, 768, device="cuda", dtype=torch.bfloat16)
            with torch.no_grad():
                torch.compile(head)(x)
        """
    )
    update = "--gpumem-update-baselines"
    run(project, update).assert_outcomes(passed=3)

    alone = run(project, "-k", "2048")
    alone.assert_outcomes(passed=1, deselected=2)
    alone.stdout.no_fnmatch_line("*under its baseline*")
