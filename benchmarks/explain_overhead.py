"""What explaining costs: a simulated training step of GPT-2 small, plain and accounted for.

``python benchmarks/explain_overhead.py [--layers N] [--steps N]`` prints both times of a test that
does so many steps, and their ratio. Accounted for means: modules, tensors and optimizers are
watched, and afterwards every peak is composed by category and source line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from training_step import training_step

from pytest_gpumem.attribution.composition import compositions
from pytest_gpumem.measurement.automatic_phases import AutomaticPhases
from pytest_gpumem.measurement.composition import PeakRecorder
from pytest_gpumem.measurement.phases import PhaseTracker
from pytest_gpumem.measurement.recorded import SimulatedRecorder
from pytest_gpumem.measurement.statistics import CudaStatistics
from pytest_gpumem.simulated.simulation import SimulatedGPU

REPEATS = 15


def plain(step: Callable[[], None], steps: int) -> None:
    """Run ``steps`` steps with their phases found."""
    tracker = PhaseTracker(CudaStatistics())
    with tracker.window("call"), AutomaticPhases(tracker).watching():
        for _ in range(steps):
            step()


def accounted(step: Callable[[], None], steps: int, gpu: SimulatedGPU) -> int:
    """Do the same and compose the peaks; returns how many sites there are."""
    account = PeakRecorder(SimulatedRecorder(gpu.simulation), "")
    tracker = PhaseTracker(CudaStatistics(), account.positions)
    account.begin((), None)
    with tracker.window("call"), AutomaticPhases(tracker, account.observer).watching():
        for _ in range(steps):
            step()
    account.end()
    found = compositions(account.history(gpu.index, tracker, ()))
    return sum(len(composition.sites) for composition in found.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1)
    arguments = parser.parse_args()
    (gpu,) = SimulatedGPU.machine("A100-80GB")
    durations: dict[str, list[float]] = {"plain": [], "accounted": []}
    sites = 0
    with gpu.active():
        step = training_step("cuda", arguments.layers)
        step()
        for _ in range(REPEATS):  # in turns, so that both see the machine alike
            start = time.perf_counter()
            plain(step, arguments.steps)
            middle = time.perf_counter()
            sites = accounted(step, arguments.steps, gpu)
            durations["plain"].append(middle - start)
            durations["accounted"].append(time.perf_counter() - middle)
    # Other work of the machine only makes a run longer.
    shortest = {name: min(values) for name, values in durations.items()}
    print(f"GPT-2 training, {arguments.layers} layers, {arguments.steps} simulated step(s)")
    for name, seconds in shortest.items():
        print(f"  {name:<10}{seconds * 1000:8.1f} ms")
    ratio = shortest["accounted"] / shortest["plain"]
    print(f"  accounted is {ratio:.2f} x plain; {sites} sites at the peaks of the phases")


if __name__ == "__main__":
    main()
