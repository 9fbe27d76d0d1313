"""200 tests on one simulated GPU, by one worker and by four: ``python demonstrate.py``.

Prints how long the tests took, beside the time that no order of them can beat, and how full the
GPU was meanwhile. ``--seeds 0 1 2`` draws other sizes; exits with 1 if a test failed, ran twice or
not at all, or if the GPU was promised to more tests than fit at any moment.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from pytest_gpumem.sharing.ledger import Ledger
from pytest_gpumem.sharing.usage import RunUsage, usages
from pytest_gpumem.simulated.gpu.catalogue import GPUS

TESTS, WORKERS = 200, 4
CAPACITY = GPUS["V100"].total_memory


def run(workers: int, seed: int, folder: str) -> tuple[str, RunUsage]:
    """Run the tests; return pytest's last line and the use of the GPU."""
    tests = Path(__file__).with_name("test_many.py")
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:randomly"),
            *("--gpumem-device=sim", "--gpumem-share", f"-n{workers}", "--dist=load"),
        ],
        env={
            **os.environ,
            "SHARED_GPU_TESTS": str(TESTS),
            "SHARED_GPU_SEED": str(seed),
            "GPUMEM_SHARE_DIR": folder,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    ledger = Ledger(Path(folder))
    stays = ledger.stays()
    ledger.close()
    (usage,) = usages(stays, stays[-1].run, CAPACITY)
    return found.stdout.splitlines()[-1].strip("= "), usage


def faults(last: str, usage: RunUsage) -> list[str]:
    """Return the faults of a run."""
    found = []
    if not re.match(rf"{TESTS} passed\b", last):
        found.append(last)
    runs = Counter(span.nodeid for span in usage.spans)
    if len(runs) != TESTS or set(runs.values()) != {1}:
        found.append(f"{len(runs)} tests had {sum(runs.values())} runs")
    if usage.peak > CAPACITY:
        found.append(f"{usage.peak:,} B were promised of {CAPACITY:,}")
    return found


def main() -> int:
    """Run the tests twice for each seed, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    problems = []
    for seed in parser.parse_args().seeds:
        spans = {}
        for workers in (1, WORKERS):
            with tempfile.TemporaryDirectory() as folder:
                last, usage = run(workers, seed, folder)
            spans[workers] = usage.makespan
            problems += faults(last, usage)
            print(
                f"{workers} worker{'s' * (workers > 1)}, seed {seed}: {usage.makespan:6.1f} s, "
                f"{usage.makespan / usage.bound:.2f} x the {usage.bound:.1f} s that no order can "
                f"beat\n  use of the GPU over time  |{usage.picture()}|"
            )
        print(f"  {spans[1] / spans[WORKERS]:.1f} x faster with {WORKERS} workers\n")
    print(*problems, sep="\n", end="\n" * bool(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
