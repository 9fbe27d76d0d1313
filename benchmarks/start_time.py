"""What starting costs: a marked test beside ``import torch``, and the commands that need no torch.

    python benchmarks/start_time.py [--device dry]

Each round runs every command once, in turn, so that what else the machine does strikes all alike;
the table shows medians of CPU time, which other processes disturb least, and of wall time. Exits
with 1 where the README's test takes more than ``RATIO`` times the CPU time of ``import torch``.
With ``--device dry`` torch is a CUDA build over the dry runtime, in both.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpumem.dry.load import environment

RATIO = {"sim": 1.5, "dry": 1.3}
"""By device."""
ROUNDS = 7

REPOSITORY = Path(__file__).parent.parent

_TEST = re.compile(r"```python\n(import pytest\n.*?)```", re.DOTALL)

_SNAPSHOT = """
import pickle, sys, torch, pytest_gpumem
with pytest_gpumem.simulate() as gpu:
    tensors = [torch.empty(1000 * size, device="cuda") for size in range(100)]
pickle.dump(gpu.snapshot(), open(sys.argv[1], "wb"))
"""


_NONE: Mapping[str, str] = {}


@dataclass
class Case:
    """A command, and the seconds that each run of it has taken: of CPU, and on the wall."""

    name: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def run(self, folder: Path) -> None:
        """Run it once in ``folder``."""
        before, start = os.times(), time.perf_counter()
        _run(self.arguments, folder, self.variables)
        after = os.times()
        self.wall.append(time.perf_counter() - start)
        self.cpu.append(
            after.children_user
            - before.children_user
            + after.children_system
            - before.children_system
        )


def cases(kind: str) -> list[Case]:
    """Return what is measured; ``import torch`` first."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_gpumem.plugin")
    gpumem = ("-m", "pytest_gpumem.cli")
    device = f"--gpumem-device={kind}:A100-40GB"
    preloaded = environment("A100-40GB") if kind == "dry" else {}
    return [
        Case("import torch", ("-c", "import torch"), preloaded),
        Case("pytest, a marked test", (*pytest, device, "test_marked.py")),
        Case("pytest, no marked test", (*pytest, "test_plain.py")),
        Case("  the same without gpumem", (*pytest[:-2], "test_plain.py")),
        Case("  import torch, without gpumem", (*pytest[:-2], "test_torch.py"), preloaded),
        Case("gpumem --help", (*gpumem, "--help")),
        Case("gpumem compare", (*gpumem, "compare", "report.json", "report.json")),
        Case("gpumem replay", (*gpumem, "replay", "snapshot.pickle")),
    ]


def prepare(folder: Path, measured: list[Case]) -> None:
    """Write what the commands read."""
    found = _TEST.search((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert found is not None, "the README begins with a marked test"
    (folder / "test_marked.py").write_text(found.group(1))
    (folder / "test_plain.py").write_text("def test_plain():\n    pass\n")
    (folder / "test_torch.py").write_text("import torch\n\ndef test_plain():\n    pass\n")
    _run((*measured[1].arguments, "--gpumem-report=json:report.json"), folder)
    _run(("-c", _SNAPSHOT, "snapshot.pickle"), folder, measured[0].variables)


def _run(arguments: tuple[str, ...], folder: Path, variables: Mapping[str, str] = _NONE) -> None:
    everything = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": str(REPOSITORY),
        **variables,
    }
    subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=everything, capture_output=True, check=True
    )


def main() -> int:
    """Print the table; return 1 where the README's test is over its ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=tuple(RATIO), default="sim")
    kind = parser.parse_args().device
    measured = cases(kind)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, measured)
        for case in measured:
            _run(case.arguments, folder, case.variables)  # compiles what it imports
        for _ in range(ROUNDS):
            for case in measured:
                case.run(folder)
    torch = statistics.median(measured[0].cpu), statistics.median(measured[0].wall)
    print(f"{'seconds':<26}{'CPU':>8}{'x torch':>9}{'wall':>8}{'x torch':>9}")
    for case in measured:
        cpu, wall = statistics.median(case.cpu), statistics.median(case.wall)
        print(f"{case.name:<26}{cpu:8.2f}{cpu / torch[0]:9.2f}{wall:8.2f}{wall / torch[1]:9.2f}")
    ratio = statistics.median(measured[1].cpu) / torch[0]
    print(f"a marked test: {ratio:.2f} of {RATIO[kind]} times import torch")
    return int(ratio > RATIO[kind])


if __name__ == "__main__":
    sys.exit(main())
