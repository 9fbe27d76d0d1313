"""What the plugin costs a test on a CUDA device: marked tests beside bare ones, in one process.

    python benchmarks/plugin_overhead.py [--device sim] [--fours N] [--steps N]
    python -m pytest_gpumem.dry benchmarks/plugin_overhead.py

Budgets, without history: 1 % of a training step of at least 100 ms, and 5 ms for a test as a whole.
On the dry device, where no kernel takes time, 5 % of the processor time of a step of 48 layers.
Tests come in fours, bare, marked, marked, bare, so that neither kind gains by its place; the cost
is the median over the fours, of each test's least step. Exits with 1 where a budget is exceeded.
``--device sim`` only shows that everything runs: what it prints is no cost of a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from training_step import training_step

from pytest_gpumem import simulate
from pytest_gpumem.dry.load import is_loaded

STEP_SHARE, HOST_SHARE = 0.01, 0.05
STEP_SECONDS = 0.1
TEST_SECONDS = 0.005

LAYERS = (3, 6, 12, 24, 48)
"""Tried in turn until a step takes long enough."""

Step = Callable[[], None]

TINY = 'torch.empty(1, device="cuda")'
TRAINING = "stopwatch.steps()"

ORDER = ("bare", "marked", "marked", "bare")

TEST = """
{mark}
def test_{kind}_{number}(stopwatch):
    {body}
"""


class Stopwatch:
    """A plugin that takes the time of tests, and of the steps in them, in the order they run."""

    def __init__(self, step: Step | None = None, count: int = 0) -> None:
        self._step = step
        self._count = count
        self.of_tests: list[float] = []
        self.of_steps: list[float] = []
        """The least of each test."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Take the time of everything that pytest does for a test."""
        start = time.perf_counter()
        result = yield
        self.of_tests.append(time.perf_counter() - start)
        return result

    @pytest.fixture
    def stopwatch(self) -> Stopwatch:
        """The stopwatch itself."""
        return self

    def steps(self) -> None:
        """Do a step that does not count, since memory is cold, and take the time of others."""
        assert self._step is not None
        duration(self._step)
        self.of_steps.append(min(duration(self._step) for _ in range(self._count)))


def duration(step: Step) -> float:
    """Seconds that a step takes, its kernels included; of the processor where there are none."""
    clock = time.process_time if is_loaded() else time.perf_counter
    torch.cuda.synchronize()
    start = clock()
    step()
    torch.cuda.synchronize()
    return clock() - start


def run(body: str, fours: int, stopwatch: Stopwatch) -> None:
    """Run ``fours`` of tests; exits where one of them fails."""
    installed = any(entry.name == "gpumem" for entry in entry_points(group="pytest11"))
    loaded = [] if installed else ["-p", "pytest_gpumem.plugin"]
    marks = {"bare": "", "marked": "@pytest.mark.gpumem"}
    tests = "".join(
        TEST.format(mark=marks[kind], kind=kind, number=number, body=body)
        for number, kind in enumerate(ORDER * fours)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"test_overhead_{len(body)}.py"
        path.write_text(f"import pytest\nimport torch\n{tests}")
        options = [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "-p",
            "no:asyncio",
            "-p",
            "no:terminal",
        ]
        arguments = [*loaded, *options, "--gpumem-device=cuda", f"--rootdir={folder}", str(path)]
        code = pytest.main(arguments, plugins=[stopwatch])
    if code:
        sys.exit(f"the tests of the benchmark end with exit code {int(code)}")


def long_step(simulated: bool) -> tuple[Step, int]:
    """Return a training step that takes long enough, and its layers."""
    for layers in LAYERS[:-1]:
        step = training_step("cuda", layers)
        step()
        if simulated or duration(step) >= STEP_SECONDS:
            return step, layers
        del step
        torch.cuda.empty_cache()
    return training_step("cuda", LAYERS[-1]), LAYERS[-1]


def row(name: str, seconds: list[float], budget: float, *, share: bool = False) -> bool:
    """Print a row, return whether the budget is kept; ``share``: it is a share of a bare one."""
    fours = [seconds[start : start + 4] for start in range(0, len(seconds), 4)]
    bare = statistics.median((four[0] + four[3]) / 2 for four in fours)
    cost = statistics.median((four[1] + four[2] - four[0] - four[3]) / 2 for four in fours)
    allowed = budget * bare if share else budget
    kept = cost <= allowed
    print(
        f"{name:<24}{bare * 1000:>10.2f}{cost * 1000:>10.2f}{allowed * 1000:>10.2f}"
        f"  {'kept' if kept else 'exceeded'}"
    )
    return kept


def main() -> int:
    """Print the table; return 1 where a budget of a real device is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument(
        "--fours", type=int, default=25, help="of short tests; a fifth of long ones"
    )
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    simulated = arguments.device == "sim"
    if not simulated and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device; --device sim simulates one")
    with simulate("A100-80GB") if simulated else nullcontext():
        torch.empty(1, device="cuda")
        tests = Stopwatch()
        run(TINY, arguments.fours, tests)
        step, layers = long_step(simulated)
        training = Stopwatch(step, arguments.steps)
        run(TRAINING, max(arguments.fours // 5, 1), training)
        name = torch.cuda.get_device_name()
    kind = "simulated " if simulated else "dry " if is_loaded() else ""
    print(f"{kind}{name}, torch {torch.__version__}; medians in ms")
    print(f"{'':<24}{'bare':>10}{'cost':>10}{'budget':>10}")
    # The first test of each kind imports what the others find loaded.
    kept = row("a test", tests.of_tests[4:], TEST_SECONDS)
    share = HOST_SHARE if is_loaded() else STEP_SHARE
    kept &= row(f"a step of {layers} layers", training.of_steps, share, share=True)
    return int(not kept and not simulated)


if __name__ == "__main__":
    sys.exit(main())
