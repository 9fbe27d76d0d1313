"""Many jobs write the baselines of one folder at once, and are killed at random moments.

    python benchmarks/baseline_writers.py --seconds 120 --processes 8 --files 20

A writer notes an update once it is made, in a file of its own that survives it. In the end every
update that was noted must stand in its file. Prints a table and exits with 1 unless nothing was
lost, no reader ever saw a torn file, and neither git nor the folder shows anything left over.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import MutableMapping
from operator import methodcaller
from pathlib import Path

from pytest_gpumem.baseline.locks import FOLDER
from pytest_gpumem.baseline.store import BaselineEntry, BaselineError, BaselineStore
from pytest_gpumem.values.environment import Environment

T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")
FORK = multiprocessing.get_context("fork")


def module_of(number: int) -> str:
    """Return the test module of one file."""
    return f"tests/test_{number}.py"


def write(root: Path, notes: Path, name: str, files: int) -> None:
    """Add, change and remove tests of this writer's own until killed."""
    store, generator = BaselineStore(root), random.Random(name)
    own: dict[int, dict[str, int]] = {}
    with notes.open("a", buffering=1, encoding="utf-8") as log:
        for size in range(1, sys.maxsize):
            number = generator.randrange(files)
            known = own.setdefault(number, {})
            test = f"test_{name}_{generator.randrange(4)}"
            removes = test in known and generator.random() < 0.4

            def edit(
                tests: MutableMapping[str, BaselineEntry],
                test: str = test,
                removes: bool = removes,
                size: int = size,
            ) -> None:
                if removes:
                    tests.pop(test, None)
                else:
                    tests[test] = BaselineEntry(size, size, 0, 0)

            # An update in progress when the writer is killed may be in the file or not.
            log.write(f"begin {number} {test}\n")
            try:
                store.edit(T4, module_of(number), edit)
            except BaselineError as error:
                log.write(f"error {error}\n")
                continue
            known.pop(test, None) if removes else known.update({test: size})
            log.write(f"done {number} {test} {0 if removes else size}\n")


def read(root: Path, notes: Path, files: int) -> None:
    """Read every file again and again; note those that are not whole."""
    with notes.open("a", buffering=1, encoding="utf-8") as log:
        for number in (number for _ in iter(int, 1) for number in range(files)):
            try:
                BaselineStore(root).load(T4, module_of(number))
                log.write("read\n")
            except BaselineError as error:
                log.write(f"torn {error}\n")


def expected(notes: list[Path]) -> tuple[dict[tuple[int, str], int | None], int, int]:
    """Return the size of every test that was noted, ``None`` where a kill leaves it open.

    With the number of updates that were noted, and of errors.
    """
    sizes: dict[tuple[int, str], int | None] = {}
    updates = errors = 0
    for path in notes:
        for line in path.read_text().splitlines():
            kind, *rest = line.split(" ")
            if kind == "begin":
                sizes[int(rest[0]), rest[1]] = None
            elif kind == "done":
                sizes[int(rest[0]), rest[1]] = int(rest[2])
                updates += 1
            elif kind == "error":
                errors += 1
                print(line)
    return sizes, updates, errors


def campaign(arguments: argparse.Namespace, folder: Path) -> int:
    """Run writers and readers, kill some of them; return how often writers were killed."""
    generator, deadline = random.Random(arguments.seed), time.monotonic() + arguments.seconds
    root, kills, started = folder / "baselines", 0, 0
    processes: list[multiprocessing.context.ForkProcess] = []
    reader = FORK.Process(target=read, args=(root, folder / "reader", arguments.files))
    reader.start()
    while time.monotonic() < deadline:
        while len(processes) < arguments.processes:
            notes = folder / f"writer-{started}"
            process = FORK.Process(target=write, args=(root, notes, str(started), arguments.files))
            process.start()
            processes.append(process)
            started += 1
        time.sleep(generator.expovariate(arguments.kills))
        victim = processes.pop(generator.randrange(len(processes)))
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        kills += 1
    for process in (*processes, reader):
        process.kill()
        process.join()
    return kills


def lost(root: Path, sizes: dict[tuple[int, str], int | None]) -> int:
    """Return how many updates that were noted do not stand in their files."""
    store, missing = BaselineStore(root), 0
    for (number, test), size in sizes.items():
        entry = store.entry(T4, module_of(number), test)
        missing += size is not None and (entry.peak_allocated if entry else 0) != size
    return missing


def litter(root: Path) -> int:
    """Return how many files git shows that are no baselines, and how many a next write leaves."""
    command = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=all"]
    subprocess.run([*command[:3], "init", "-q"], check=True)
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    count = sum(not line.endswith(".py.json") for line in shown.splitlines())
    entry = {"test": BaselineEntry(1, 1, 0, 0)}
    BaselineStore(root).edit(T4, "tests/test_last.py", methodcaller("update", entry))
    aside = {".git", FOLDER}
    left = [path for path in root.rglob("*") if aside.isdisjoint(path.relative_to(root).parts)]
    return count + sum(path.suffix != ".json" for path in left if path.is_file())


def main() -> int:
    """Run the campaign and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=8, help="writers at a time")
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--kills", type=float, default=5.0, help="a second, on average")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = folder / "baselines"
        root.mkdir()
        kills = campaign(arguments, folder)
        sizes, updates, errors = expected(sorted(folder.glob("writer-*")))
        reads = (folder / "reader").read_text().splitlines()
        rows = {
            "updates": updates,
            "writers killed": kills,
            "files read meanwhile": sum(line == "read" for line in reads),
        }
        faults = {
            "lost updates": lost(root, sizes),
            "torn files": sum(line.startswith("torn") for line in reads),
            "writers that got no lock": errors,
            "litter": litter(root),
        }
    for label, count in {**rows, **faults}.items():
        print(f"{label:28}{count:>10,}")
    return 1 if any(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
