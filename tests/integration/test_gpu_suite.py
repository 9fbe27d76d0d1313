"""The tests of ``tests/gpu`` on a simulated device that stands in for the real one.

Without a GPU, this is how they and the code that reads a real device are exercised.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.conftest import REPOSITORY
from tests.forked import quick


def run(device: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [quick(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=REPOSITORY,
        env={**os.environ, "GPUMEM_TEST_DEVICE": device, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(
    bool(os.environ.get("GPUMEM_TEST_DEVICE")),
    reason="with GPUMEM_TEST_DEVICE this run has them itself, as under tox",
)
def test_the_gpu_tests_pass_on_a_simulated_device() -> None:
    ran = run("sim")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^\d+ passed", ran.stdout.splitlines()[-1])


def test_the_gpu_tests_without_a_device_skip_with_one_line() -> None:
    ran = run("")

    assert ran.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    (line,) = [line for line in ran.stdout.splitlines() if "SKIPPED" in line]
    assert re.search(r"SKIPPED \[1\] .*sees no CUDA device", line)
