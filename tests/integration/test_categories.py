"""Names and categories of buffers, copies of parameters and frozen parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pytest_project import Project

NET = """
    import copy

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(1024, 1024, bias=False)
            self.register_buffer("table", torch.zeros(256, 1024))

        def forward(self, x):
            return torch.relu(x * self.fc.weight)

    def step(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1024, device="cuda")).sum().backward()
        optimizer.step()

    @pytest.mark.gpumem
    def test_plain():
        step(Net().cuda())

    @pytest.mark.gpumem
    def test_copied():
        model = Net().cuda()
        average = copy.deepcopy(model)
        step(model)

    @pytest.mark.gpumem
    def test_averaged():
        model = Net().cuda()
        average = torch.optim.swa_utils.AveragedModel(model)
        step(model)

    @pytest.mark.gpumem
    def test_cloned():
        model = Net().cuda()
        average = [parameter.detach().clone() for parameter in model.parameters()]
        step(model)

    @pytest.mark.gpumem
    def test_frozen():
        model = Net().cuda()
        frozen = torch.nn.Parameter(torch.ones(1024, 1024, device="cuda"), requires_grad=False)
        never_called = torch.nn.Linear(1024, 512, bias=False, device="cuda").requires_grad_(False)
        step(model)
"""

WEIGHT, TABLE = 4 << 20, 1 << 20


@pytest.fixture
def compositions(project: Project) -> dict[str, Any]:
    project.write(test_net=NET)
    tests = project.report()
    return {
        nodeid.partition("test_net.py::test_")[2]: test["measurement"]
        for nodeid, test in tests.items()
    }


def test_copies_of_parameters_and_frozen_ones_are_parameters(compositions: dict[str, Any]) -> None:
    held = {name: measured["composition"] for name, measured in compositions.items()}
    plain = held["plain"]
    assert plain["parameters"] == WEIGHT
    assert held["copied"] == {
        **plain,
        "parameters": 2 * WEIGHT,
        "other": plain["other"] + TABLE,
    }
    assert held["averaged"]["parameters"] == 2 * WEIGHT
    assert held["averaged"]["activations"] == plain["activations"]
    # A list of clones: nothing that autograd records, and no parameters either.
    assert held["cloned"] == {**plain, "other": plain["other"] + WEIGHT}
    assert held["frozen"] == {**plain, "parameters": 2 * WEIGHT + WEIGHT // 2}


def test_buffers_are_named_and_copies_have_the_line_that_made_them(
    compositions: dict[str, Any],
) -> None:
    sites = compositions["copied"]["sites"]
    buffers = [site for site in sites if (site["operator"] or "").startswith("buffer ")]
    assert [(site["operator"], site["bytes"]) for site in buffers] == [
        ("buffer Net.table", TABLE),
        ("buffer Net.table", TABLE),
    ]
    lines = [site["site"] for site in sites if site["operator"] == "torch.clone"]
    assert lines == ["test_net.py:27"]
