"""Tests of a user's project that fail, and what they leave to later ones."""

from __future__ import annotations

from pathlib import Path

from tests.dry.conftest import Run
from tests.dry.test_plugin import pytest_in, run_in

OPEN_CAPTURES = """
import pytest, torch

def begin():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        torch.ones(1, device="cuda")
        return graph

@pytest.mark.gpumem
def test_is_left_open():
    begin()
    raise ValueError("its own error")

@pytest.mark.gpumem
def test_is_dropped():
    begin()

@pytest.mark.gpumem
def test_is_invalidated():
    graph = begin()
    with pytest.raises(RuntimeError):
        torch.cuda.synchronize()

@pytest.mark.gpumem(max=1024)
def test_after_them():
    torch.ones(256, device="cuda")
    torch.cuda.synchronize()
"""


def test_a_capture_ends_with_the_body_that_left_it_open(dry_run: Run, tmp_path: Path) -> None:
    """Until then CUDA refuses to wait for the device, which the next test begins with."""
    (tmp_path / "test_captures.py").write_text(OPEN_CAPTURES)

    done = pytest_in(tmp_path)

    assert "test_is_left_open - ValueError: its own error" in done.stdout
    assert "1 failed, 3 passed" in done.stdout


def test_an_allocator_without_blocks_is_refused_in_one_sentence(
    dry_run: Run, tmp_path: Path
) -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    (tmp_path / "test_captures.py").write_text(OPEN_CAPTURES)
    (tmp_path / "train.py").write_text("import torch; torch.ones(1, device='cuda')")
    sentence = (
        "torch allocates by 'cudaMallocAsync', which does not report its blocks: measure with "
        "torch's native allocator"
    )

    done = pytest_in(tmp_path, **setting)
    ran = run_in(tmp_path, "pytest_gpumem.cli", "run", "--device", "dry", "train.py", **setting)

    assert sentence in done.stdout.splitlines()
    assert "Traceback" not in done.stdout
    assert "4 errors" in done.stdout
    assert (ran.returncode, ran.stderr) == (2, f"gpumem: train.py: {sentence}\n")


LONG = """
import pytest, torch

@pytest.mark.gpumem
def test_long():
    x = torch.randn(1500, 1500, device="cuda")
    for _ in range(8):
        x = torch.tanh(x @ x)
    if x.sum() > 1e9:
        torch.empty(1, device="cuda")
"""


def test_values_that_take_too_long_skip_their_test_at_once(dry_run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(LONG)

    done = pytest_in(tmp_path, "--gpumem-sim-values-limit=0.01")

    assert "1 skipped" in done.stdout
    assert "more than the 0.01 s that" in " ".join(done.stdout.split())
