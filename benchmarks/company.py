"""One number for each test in any company: bodies that make cycles, among random other tests.

    python benchmarks/company.py [--rounds N] [--seed N]

Writes a project with bodies that leave garbage in cycles of many sizes and others that allocate
many Python objects, marked and not, and runs it in shuffled orders, with two workers, and each
body alone. Exits with 1 and names the test where two runs of it differ. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from textwrap import dedent

CYCLES = ((20, 1 << 20), (24, 1 << 18), (150, 1 << 16), (701, 512), (1500, 4096), (3000, 1024))
"""Cycles of a body, and the bytes of each."""

MEASURED = dedent("""
    import pytest, torch

    class Holder:
        pass

    def by_list(nbytes):
        cycle = [torch.empty(nbytes, dtype=torch.uint8, device="cuda")]
        cycle.append(cycle)

    def by_attribute(nbytes):
        holder = Holder()
        holder.me, holder.tensor = holder, torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def by_exception(nbytes):
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        try:
            raise ValueError
        except ValueError as error:
            kept = error

    def by_graph(nbytes):
        weight = torch.ones(nbytes // 4, device="cuda", requires_grad=True)
        weight.history = [weight.exp().sum(), weight]
        weight.history[0].backward(retain_graph=True)

    @pytest.mark.gpumem
    @pytest.mark.parametrize("make", [by_list, by_attribute, by_exception, by_graph])
    @pytest.mark.parametrize("count, nbytes", CYCLES)
    def test_cycles(make, count, nbytes):
        for _ in range(count):
            make(nbytes)
""")

STRANGERS = dedent("""
    import pytest, torch

    @pytest.mark.parametrize("count", COUNTS)
    def test_makes_objects(count):
        kept = [[{number}] for number in range(count)]
        kept.append(kept)

    @pytest.mark.gpumem
    @pytest.mark.parametrize("count", COUNTS)
    def test_trains(count):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(count % 7 + 1))).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        kept = [[] for _ in range(count)]
        kept.append(kept)
""")


def write_project(folder: Path, chance: random.Random) -> list[str]:
    """Write the modules; return the ids of all tests."""
    counts = [chance.randrange(30_000) for _ in range(6)]
    (folder / "test_cycles.py").write_text(MEASURED.replace("CYCLES", repr(CYCLES)))
    for name in ("test_a.py", "test_z.py"):
        (folder / name).write_text(STRANGERS.replace("COUNTS", repr(counts)))
    listed = subprocess.run(
        [*PYTEST, "--collect-only", "-q"], cwd=folder, capture_output=True, text=True, check=True
    )
    return [line for line in listed.stdout.splitlines() if "::" in line]


PYTEST = (sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider")


def peaks(folder: Path, *arguments: str) -> dict[str, tuple[int, int]]:
    """Run tests and return what the cyclic bodies peaked at: allocated and reserved bytes."""
    report = folder / "report.json"
    options = ["--gpumem-device=sim:T4", f"--gpumem-report=json:{report}"]
    run = subprocess.run(
        [*PYTEST, "-q", *options, *arguments], cwd=folder, capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(run.stdout + run.stderr)
    return {
        test["nodeid"]: (
            test["measurement"]["peak_allocated"],
            test["measurement"]["peak_reserved"],
        )
        for test in json.loads(report.read_text())["tests"]
    }


def main() -> int:
    """Print what was run; return 1 where numbers differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", type=int, default=6, help="bodies that are run by themselves")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    seen: dict[str, set[tuple[int, int]]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = write_project(folder, chance)
        cyclic = [test for test in tests if "test_cycles" in test]
        runs = [["-n2"], *(chance.sample(tests, len(tests)) for _ in range(arguments.rounds))]
        runs += [[test] for test in chance.sample(cyclic, arguments.alone)]
        for run in runs:
            for test, peak in peaks(folder, *run).items():
                seen[test].add(peak)
    different = {test: numbers for test, numbers in seen.items() if len(numbers) > 1}
    for test, found in different.items():
        print(f"{test}: {sorted(found)}")
    print(f"{len(seen)} tests in {len(runs)} runs: {len(different)} with more than one number")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
