"""The simulated device does as torch's own code does, on a sample that changes every day."""

from __future__ import annotations

import datetime
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dry.conftest import bare_environment, why_not

REPOSITORY = Path(__file__).parent.parent.parent
CORPORA = "op,module,optim,scenario,program"
"""Without programs of strangers, which need many packages and compile."""
GROUPS = "120"
"""Groups of samples, one case of each: some 270 passes; and 12 programs beside them."""


def test_a_sample_of_programs_has_the_events_of_torchs_own_code() -> None:
    if reason := why_not():
        pytest.skip(reason)
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("PyTorch's samples need expecttest")
    seed = os.environ.get("GPUMEM_TRUTH_SEED", str(datetime.date.today()))
    command = [sys.executable, "benchmarks/truth.py", "--sample", GROUPS, "--seed", seed]
    done = subprocess.run(
        [*command, "--dtype", "f32,bf16", "--corpus", CORPORA],
        cwd=REPOSITORY,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    named = [line for line in done.stdout.splitlines() if line.startswith("not known: ")]
    assert done.returncode in (0, 1), done.stderr
    assert not named, f"python benchmarks/truth.py with the seed {seed} finds\n{done.stdout}"
