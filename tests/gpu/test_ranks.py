"""A test of several ranks has a process and a GPU for each."""

from __future__ import annotations

import multiprocessing.spawn
import os
from collections.abc import Iterator

import pytest
import torch

from pytest_gpumem.simulating import simulate
from tests.forked import quick
from tests.gpu.conftest import CudaProject
from tests.gpu.device import stands_in

STAND_IN = """
    import os
    from pytest_gpumem.simulating import simulate

    SIZE = int(os.environ.get("WORLD_SIZE", "1"))
    STANDING_IN = simulate("MODEL", world_size=SIZE, rank=int(os.environ.get("RANK", "0")))

    def pytest_sessionstart():
        if SIZE > 1:
            STANDING_IN.__enter__()
"""
"""A conftest.py that gives each rank's process the simulated device, below the plugin."""

TESTS = """
    import os
    import torch.distributed as dist

    @pytest.mark.gpumem(ranks=[2, 64], max="6KiB")
    def test_worst():
        assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), 2)
        assert torch.cuda.current_device() == int(os.environ["LOCAL_RANK"])
        torch.zeros(1024 * (1 + dist.get_rank()), device="cuda")

    @pytest.mark.gpumem(ranks=2)
    def test_killed():
        torch.zeros(1024, device="cuda")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
"""


@pytest.fixture
def _two_gpus(device: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    model = stands_in()
    if model is not None:
        monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(quick()))
        with simulate(f"{model}*2"):
            yield
        return
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    yield


@pytest.mark.usefixtures("_two_gpus")
def test_the_rank_with_the_highest_peak_is_judged(cuda: CudaProject) -> None:
    files = {"test_ranks": TESTS}
    if (model := stands_in()) is not None:
        files["conftest"] = STAND_IN.replace("MODEL", model)
    cuda.write(**files)

    result = cuda.run("-rs")

    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "the test peaked at 8.0 KiB (8,192 B), 2.0 KiB over its limit of 6KiB*",
            "all 2 ranks ran; rank 1 has the highest peak, 8.0 KiB, 33.3% over the mean, *",
            "*rank 1 of 2: it ended by SIGKILL in the middle of the test (exit code -9)*",
            "*is for 64 ranks, each with a GPU, and this machine has *: simulate them with *",
        ],
    )
