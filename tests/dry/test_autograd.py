"""Autograd on the dry device: the order of nodes is that of a new process in each test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.dry.conftest import Run, bare_environment

SECOND_BACKWARD = """
import pytest, torch
from torch import nn

@pytest.mark.gpumem
@pytest.mark.parametrize("number", range(3))
def test_second_backward(number):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.norm().backward()
"""


def test_the_order_does_not_depend_on_nodes_of_earlier_tests(dry_run: Run, tmp_path: Path) -> None:
    """The second pass has nodes of the program's thread and of the GPU's, each with its count.

    In a new process, in which neither has made a node, torch 2.15 peaks at 8,588,288 bytes and
    computes the gradient of the last bias first; every later time in that process it is another
    one, and 4,096 bytes more.
    """
    (tmp_path / "test_it.py").write_text(SECOND_BACKWARD)
    options = ("-p", "no:cacheprovider", "--gpumem-report=json:it.json")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--gpumem-device=dry:A100-40GB", *options],
        cwd=tmp_path,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    tests = json.loads((tmp_path / "it.json").read_text())["tests"]
    assert len({test["measurement"]["peak_allocated"] for test in tests}) == 1
