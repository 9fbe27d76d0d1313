"""Random numbers that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unfilled() -> Iterator[None]:
    """Leave large random tensors on the CPU as the system gave them, if the GPU computes nothing.

    For runs whose memory alone matters: half of the time of a step that makes its model on the CPU
    goes into random weights, and samples for the largest batch of a large GPU, once written, need
    more memory than a laptop has. Does nothing outside a simulation.
    """
    from pytest_gpumem.simulated.simulation import active_simulation

    machine = active_simulation()
    if machine is None or machine.values.everything:
        yield
        return
    before, machine.leaves_unfilled = machine.leaves_unfilled, True
    try:
        yield
    finally:
        machine.leaves_unfilled = before
