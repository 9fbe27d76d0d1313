"""Random numbers that are never read, and so are not drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unfilled() -> Iterator[None]:
    """Leave large random tensors on the CPU as the system gave them, if the GPU computes nothing.

    For runs where only memory matters: half of the time of a step that makes its model on the CPU
    is spent on random weights, and samples for the largest batch of a large GPU, once written, need
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
