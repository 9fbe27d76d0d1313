"""Liger's Triton kernels against what Liger measured of them, with the release that is installed.

The measurements lie outside this repository: $GPUMEM_GROUNDTRUTH names their folder. All releases
are run by ``benchmarks/triton_operators.py``, here in a process of its own: it imports Liger
without its models.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
GROUNDTRUTH = os.environ.get("GPUMEM_GROUNDTRUTH")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
@pytest.mark.skipif(GROUNDTRUTH is None, reason="$GPUMEM_GROUNDTRUTH names no folder")
def test_peaks_are_the_measured_ones() -> None:
    run = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "triton_operators.py")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    *rows, total = run.stdout.splitlines()
    if not rows:
        pytest.skip(f"nothing was measured of {total.partition(':')[0]}")

    differ = [row for row in rows if not row.endswith((" equal", "(remainders of cached blocks)"))]
    assert differ == []
