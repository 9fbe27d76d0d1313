"""Phases of a loop: one for all of it, or each time by itself as well."""

from __future__ import annotations

from tests.pytest_project import Project

KIB = 1 << 10

GROWING = """
    def test_grow(gpumem):
        with gpumem.phase("load"):
            torch.empty(256, device="cuda")
        kept = []
        for _ in range(3):
            with gpumem.phase("token"):
                kept.append(torch.empty(1 << 20, device="cuda"))
"""


def phases(project: Project, *args: str) -> dict[str, tuple[int, int, str | None]]:
    measurement = project.report(*args)["test_it.py::test_grow"]["measurement"]
    return {
        name: (phase["peak_allocated"], phase["entered"], phase["parent"])
        for name, phase in measurement["phases"].items()
        if name not in ("setup", "call")
    }


def test_phases_of_a_loop_are_folded(project: Project) -> None:
    project.write(test_it=GROWING)
    folded = {"load": (KIB, 1, "call"), "token": (12 << 20, 3, "call")}
    assert phases(project) == folded
    assert phases(project, "--gpumem-loop-phases=folded") == folded


def test_phases_of_a_loop_are_numbered_on_request(project: Project) -> None:
    project.write(test_it=GROWING)
    project.write_ini("gpumem_loop_phases = numbered")
    assert phases(project) == {
        "load": (KIB, 1, "call"),  # entered once, so not numbered
        "token": (12 << 20, 3, "call"),
        "token_1": (4 << 20, 1, "token"),
        "token_2": (8 << 20, 1, "token"),
        "token_3": (12 << 20, 1, "token"),
    }


def test_a_numbered_phase_has_a_limit(project: Project) -> None:
    marker = '@pytest.mark.gpumem(phases={"token_2": "7MiB"})'
    project.write(test_it=GROWING.replace("def test_grow", f"{marker}\n    def test_grow"))
    result = project.run("--gpumem-loop-phases=numbered")
    result.assert_outcomes(failed=1)
    assert "token_2 peaked at 8.0 MiB" in result.stdout.str()


def test_automatic_phases_are_numbered_too(project: Project) -> None:
    project.write(
        test_it="""
    def test_grow():
        layer = torch.nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(2):
            def closure():
                layer(torch.ones(8, 8, device="cuda")).sum().backward()
            optimizer.step(closure)
    """
    )
    found = phases(project, "--gpumem-loop-phases=numbered", "--gpumem-all")
    assert {name: phase[1:] for name, phase in found.items()} == {
        "forward": (2, "call"),
        "forward_1": (1, "forward"),
        "backward": (2, "call"),
        "backward_1": (1, "backward"),
        "step": (2, "call"),
        "step_1": (1, "step"),
        "step_2": (1, "step"),
        "forward_2": (1, "forward"),
        "backward_2": (1, "backward"),
    }


def test_another_value_of_loop_phases_is_refused(project: Project) -> None:
    result = project.run("--gpumem-loop-phases=each")
    result.stderr.fnmatch_lines(
        ["ERROR: --gpumem-loop-phases='each' is not accepted; write folded or numbered"]
    )
