"""Runs that share a GPU are killed at random moments; what they held must be free again.

    python benchmarks/killed_runs.py --rounds 100

Each round starts one or two runs of two workers each that share one simulated GPU and update
baselines, and kills a worker that holds a lease, a controller, or both runs at once. The next run
must start, and every tenth one is left alone and must pass. Prints a table and exits with 1 unless
leases were free soon, no baseline was lost or torn, and no lock or temporary file was left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from pytest_gpumem.baseline.locks import FOLDER
from pytest_gpumem.sharing.ledger import Ledger

TESTS = """
import time, pytest, torch

@pytest.mark.parametrize("number", range({tests}))
@pytest.mark.gpumem(max_reserved="{size}GiB")
def test_it(number):
    x = torch.empty(({size} << 30) - (number << 21), dtype=torch.uint8, device="cuda")
    time.sleep(0.05)
"""
SIZE, NUMBER = 6, 12
COMPLETE_EVERY = 10
"""Rounds; the runs between are killed, and have to get as far as their first test."""
FREE_WITHIN = 20.0
"""Seconds: a worker whose controller is gone ends its test, and sees then that it is alone."""
KINDS = ("a worker that holds a lease", "the controller", "two runs at once")


class Campaign:
    """A project whose runs are killed repeatedly."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._shared = folder / "shared"
        self._generator = random.Random(seed)
        self.found: Counter[str] = Counter()
        self._was_complete = False
        for name in ("a", "b"):
            tests = TESTS.format(tests=NUMBER, size=SIZE)
            (folder / f"test_{name}.py").write_text(tests)

    def run(self, kind: str) -> None:
        """Start what ``kind`` is about, kill it, and look at what is left."""
        names = ("a", "b") if kind == KINDS[2] else ("a",)
        runs = [self._start(name) for name in names]
        self._wait_for_leases()
        time.sleep(self._generator.expovariate(3.0))
        victims = [run.pid for run in runs]
        if kind == KINDS[0]:
            victims = self._owners()[:1]
        self.found[f"killed: {kind}"] += len(victims)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        if kind == KINDS[0]:
            self.found["runs that did not survive a worker"] += runs[0].wait() not in (0, 1)
        for run in runs:
            run.wait()
        self.found["leases that were not free soon"] += not self._is_free()
        self._check_files()

    def finish(self) -> None:
        """Check that a run that is not killed passes, and finds the baselines of all tests."""
        self.found["next runs that failed"] += self._start("a").wait() != 0
        self._check_files(complete=True)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        options = ["--gpumem-share", "--gpumem-device=sim:T4", "--gpumem-update-baselines", "-n2"]
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:randomly",
                *options,
                f"test_{name}.py",
            ],
            cwd=self._folder,
            env={**os.environ, "GPUMEM_SHARE_DIR": str(self._shared)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _owners(self) -> list[int]:
        ledger = Ledger(self._shared)
        running = [test.pid for test in ledger.state({}).running]
        ledger.close()
        return running

    def _wait_for_leases(self) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if self._shared.exists() and self._owners():
                return
            time.sleep(0.02)
        raise SystemExit("no run got as far as its first test within two minutes")

    def _is_free(self) -> bool:
        end = time.monotonic() + FREE_WITHIN
        while time.monotonic() < end:
            if not self._owners():
                return True
            time.sleep(0.1)
        return False

    def _check_files(self, *, complete: bool = False) -> None:
        """Every file is whole, and has the tests of the last ``complete`` run; nothing beside."""
        files = [path for path in (self._folder / "baselines").rglob("*") if path.is_file()]
        for path in files:
            if path.suffix != ".json":
                self.found["litter"] += path.parent.name != FOLDER
                continue
            try:
                tests = json.loads(path.read_text())["tests"]
            except ValueError:
                self.found["torn baselines"] += 1
                continue
            if path.name == "test_a.py.json" and (complete or self._was_complete):
                self.found["lost baselines"] += len(tests) != NUMBER
        self._was_complete |= complete
        # Workers notice at their next report that their controller is gone.
        end = time.monotonic() + FREE_WITHIN
        while (left := self._processes()) and time.monotonic() < end:
            time.sleep(0.1)
        self.found["processes left"] += len(left)

    def _processes(self) -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if self._is_ours(one)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.cwd() == str(self._folder)
        except psutil.Error:
            return False


def main() -> int:
    """Run the campaign and print what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        campaign = Campaign(Path(name).resolve(), arguments.seed)
        end = time.monotonic() + arguments.seconds
        for number in range(arguments.rounds):
            if time.monotonic() > end:
                break
            campaign.run(KINDS[number % len(KINDS)])
            campaign.found["killed: rounds"] += 1
            if number % COMPLETE_EVERY == 0:
                campaign.finish()
        campaign.finish()
    faults = 0
    for label, count in sorted(campaign.found.items()):
        print(f"{label:45}{count:>6}")
        faults += count * (not label.startswith("killed"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
