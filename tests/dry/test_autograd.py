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


FUNCTIONS = """
import os
import pytest, torch
from torch.nn import functional

# On one CPU, autograd's thread mostly waits for the one that it has woken.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

@pytest.mark.gpumem
@pytest.mark.parametrize("number", range(40))
def test_gradient_of_a_function(number):
    weight = torch.randn(64, device="cuda", dtype=torch.bfloat16)

    def loss(x):
        mixed = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        normed = functional.rms_norm(mixed, (64,), weight)
        return functional.dropout(normed, 0.1).softmax(-1).square().sum()

    given = torch.randn(3, 2, 4, 32, 64, device="cuda", dtype=torch.bfloat16)
    torch.func.grad(loss)(given[0])
    torch.func.vmap(loss, randomness="different")(given)
"""


def test_a_pass_is_dropped_before_its_caller_goes_on(dry_run: Run, tmp_path: Path) -> None:
    """The graph that ``torch.func.grad`` makes is gone, as a simulation has it: no peak has it."""
    assert len(peaks(tmp_path, FUNCTIONS)) == 1


def test_the_order_does_not_depend_on_nodes_of_earlier_tests(dry_run: Run, tmp_path: Path) -> None:
    """The second pass has nodes of the program's thread and of the GPU's, each with its count.

    In a new process, in which neither has made a node, torch 2.15 peaks at 8,588,288 bytes and
    computes the gradient of the last bias first; every later time in that process it is another
    one, and 4,096 bytes more.
    """
    assert len(peaks(tmp_path, SECOND_BACKWARD)) == 1


def peaks(folder: Path, source: str) -> set[int]:
    """Return the peaks of the tests in ``source``, run in a process of their own."""
    (folder / "test_it.py").write_text(source)
    options = ("-p", "no:cacheprovider", "--gpumem-report=json:it.json")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--gpumem-device=dry:A100-40GB", *options],
        cwd=folder,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    tests = json.loads((folder / "it.json").read_text())["tests"]
    return {test["measurement"]["peak_allocated"] for test in tests}
