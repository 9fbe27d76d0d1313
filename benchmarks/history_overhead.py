"""What recording costs on a CUDA device: a training step plain, and with stacks of two kinds.

    python benchmarks/history_overhead.py [--layers N] [--steps N] [--device sim]

This is why source lines are recorded only for a second run of a failing test
(``--gpumem-explain=failed``). ``--device sim`` only shows that everything runs: what it prints is
no cost of a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack, nullcontext

import torch
from training_step import training_step

from pytest_gpumem import simulate
from pytest_gpumem.measurement.recorded import RecordedHistory

WAYS = {"plain": None, "python": "python", "all": "all"}


def milliseconds(layers: int, steps: int) -> dict[str, float]:
    """Return the median duration of a step by what is recorded; the ways take turns."""
    step = training_step("cuda", layers)
    step()
    durations: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(steps):
        for way, stacks in WAYS.items():
            with RecordedHistory().during(stacks) if stacks else nullcontext():
                torch.cuda.synchronize()
                start = time.perf_counter()
                step()
                torch.cuda.synchronize()
                durations[way].append((time.perf_counter() - start) * 1000)
    return {way: statistics.median(times) for way, times in durations.items()}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        if arguments.device == "sim":
            stack.enter_context(simulate("A100-80GB"))
        if not torch.cuda.is_available():
            print("torch sees no CUDA device; there is nothing to measure (--device sim runs it)")
            return 1
        found = milliseconds(arguments.layers, arguments.steps)
        print(f"GPT-2 training step on {torch.cuda.get_device_name()}, {arguments.layers} layers")
    for way, duration in found.items():
        print(f"  {way:<8}{duration:9.1f} ms  {duration / found['plain']:.2f} x plain")
    return 0


if __name__ == "__main__":
    sys.exit(main())
