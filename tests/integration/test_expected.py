"""Closed forms beside the measurement, for tests that call ``gpumem.watch``."""

from __future__ import annotations

import pytest

from tests.pytest_project import Project

TESTS = """
    from torch import nn

    @pytest.fixture
    def model(gpumem):
        model = nn.Linear(256, 256).cuda()
        gpumem.watch(model)
        return model

    @pytest.mark.gpumem(warmup=1)
    def test_adam(model, gpumem):
        optimizer = torch.optim.Adam(model.parameters())
        gpumem.watch(model, optimizer)
        for _ in range(2):
            model(torch.ones(2, 256, device="cuda")).sum().backward()
            optimizer.step()

    @pytest.mark.gpumem
    def test_no_closed_form(model, gpumem):
        gpumem.watch(model, torch.optim.LBFGS(model.parameters()))

    @pytest.mark.gpumem
    def test_frozen(gpumem):
        gpumem.watch(nn.Linear(256, 256).requires_grad_(False).cuda())

    @pytest.mark.gpumem
    def test_nothing_watched():
        torch.ones(3, device="cuda")
"""

SIZE = 256 * 256 * 4 + 1024


@pytest.mark.parametrize("apart", [False, True])
def test_each_parameter_and_optimizer_counts_once(project: Project, apart: bool) -> None:
    project.write(test_it=TESTS)

    tests = project.report(*(["-n1"] if apart else []), apart=apart)

    measured = {id_.partition("::")[2]: test["measurement"] for id_, test in tests.items()}
    assert measured["test_adam"]["expected"] == {
        "parameters": SIZE,
        "gradients": SIZE,
        "optimizer state": 2 * SIZE,
    }
    # All of them are there at the peak of the second step.
    step = measured["test_adam"]["phases"]["step"]["composition"]
    for category, size in measured["test_adam"]["expected"].items():
        assert step[category] == size
    assert measured["test_no_closed_form"]["expected"] == {"parameters": SIZE, "gradients": SIZE}
    assert measured["test_frozen"]["expected"] == {"parameters": SIZE, "gradients": 0}
    assert measured["test_nothing_watched"]["expected"] == {}


def test_a_verbose_terminal_shows_the_closed_forms(project: Project) -> None:
    project.write(test_it=TESTS)

    project.run("-k", "adam").stdout.no_fnmatch_line("*by closed forms*")
    project.run("-k", "adam", "-v").stdout.fnmatch_lines(
        [
            "test_it.py::test_adam, by closed forms:",
            "  parameters 263,168 B, at most 263,168 B seen",
            "  gradients 263,168 B, at most 263,168 B seen",
            "  optimizer state 526,336 B, at most 526,336 B seen",
        ]
    )
