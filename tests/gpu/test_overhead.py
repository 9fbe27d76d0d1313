"""The benchmark of the plugin's overhead runs; its budgets are not judged by this test."""

from __future__ import annotations

import os
import subprocess

from tests.conftest import REPOSITORY
from tests.forked import quick
from tests.gpu.device import stands_in


def test_the_benchmark_of_the_overhead_runs() -> None:
    device = "cuda" if stands_in() is None else "sim"
    ran = subprocess.run(
        [
            quick(),
            "benchmarks/plugin_overhead.py",
            *("--device", device, "--fours", "3", "--steps", "1"),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    # Exit code 1: a budget is exceeded, which so few tests cannot tell reliably.
    assert ran.returncode in (0, 1), ran.stderr
    *_, header, test, step = ran.stdout.splitlines()
    assert header.split() == ["bare", "cost", "budget"]
    assert test.startswith("a test ")
    assert step.startswith("a step of ")
