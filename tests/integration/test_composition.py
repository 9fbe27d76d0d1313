"""The composition of the peak: categories by closed form, sites by line and module."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pytest_project import Project

pytestmark = pytest.mark.usefixtures("plain_workspaces")

WORKSPACE = 8_519_680
"""The workspace of cuBLAS on a T4, one for forward and one for backward."""

TESTS = """
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(256)
            self.linear = nn.Linear(256, 256)

        def forward(self, x):
            return torch.relu(self.linear(self.norm(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    @pytest.fixture(scope="module")
    def net():
        return Net().cuda()

    @pytest.mark.gpumem
    def test_step(net):
        optimizer = torch.optim.Adam(net.parameters())
        x = torch.rand(512, 256, device="cuda")
        net(x).sum().backward()
        optimizer.step()

    @pytest.mark.gpumem
    def test_inference(net):
        with torch.no_grad():
            net(torch.rand(512, 256, device="cuda"))

    @pytest.mark.gpumem
    def test_functions(gpumem):
        class Holder(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.rand(256, 256, device="cuda"))

        holder = Holder()
        gpumem.watch(holder)
        x = torch.rand(512, 256, device="cuda")
        y = x @ holder.weight
        y.sum().backward()
"""

PARAMETERS = 2 * (256 * 256 * 4 + 3 * 1024)
"""The bytes of two blocks: a weight, and three vectors of 256 numbers."""
BUFFERS = 2 * (2 * 1024 + 512)
"""Running mean and variance, and a counter."""
TENSOR = 512 * 256 * 4


def measured(project: Project, name: str) -> dict[str, Any]:
    project.write(test_net=TESTS)
    found: dict[str, Any] = project.report()[f"test_net.py::{name}"]["measurement"]
    return found


def test_categories_match_the_closed_forms(project: Project) -> None:
    phases = measured(project, "test_step")["phases"]
    # Batch norm keeps its input and two vectors of 256 numbers, linear its input, relu its output;
    # the first input belongs to the test and the last output is the net's.
    activations = 4 * TENSOR + 2 * 2 * 1024
    assert phases["forward"]["composition"] == {
        "parameters": PARAMETERS,
        "inputs": TENSOR,
        "activations": activations,
        "workspace": WORKSPACE,
        "temporaries": TENSOR,
        "other": BUFFERS,
    }
    step = phases["step"]["composition"]
    assert step["parameters"] == step["gradients"] == PARAMETERS
    assert step["optimizer state"] == 2 * PARAMETERS
    assert step["workspace"] == 2 * WORKSPACE
    assert step["other"] == BUFFERS
    assert step["inputs"] == TENSOR


def test_inference_keeps_only_its_output(project: Project) -> None:
    composition = measured(project, "test_inference")["phases"]["forward"]["composition"]
    assert composition["parameters"] == PARAMETERS
    assert composition["inputs"] == TENSOR
    assert "gradients" not in composition


def test_sites_name_line_operator_and_module(project: Project) -> None:
    sites = measured(project, "test_step")["phases"]["forward"]["sites"]
    (relu,) = [site for site in sites if site["operator"] == "torch.relu"]
    assert relu == {
        "category": "activations",
        "bytes": 2 * TENSOR,
        "count": 2,
        "site": "test_net.py:13",
        "function": "forward",
        "operator": "torch.relu",
        "module": "blocks.*",
        "shape": [512, 256],
        "dtype": "float32",
        "each": TENSOR,
    }
    weights = [site for site in sites if site["module"] == "blocks.*.linear"]
    assert {site["site"] for site in weights if site["category"] == "parameters"} == {
        "test_net.py:27"
    }
    (workspace,) = [site for site in sites if site["category"] == "workspace"]
    assert (workspace["operator"], workspace["site"]) == ("cuBLAS", None)


def test_a_watched_module_that_is_not_called_has_its_categories(project: Project) -> None:
    composition = measured(project, "test_functions")["phases"]["backward"]["composition"]
    assert composition["parameters"] == 256 * 256 * 4
    assert composition["gradients"] == 256 * 256 * 4


def test_two_runs_have_the_same_composition(project: Project) -> None:
    assert measured(project, "test_step") == measured(project, "test_step")
