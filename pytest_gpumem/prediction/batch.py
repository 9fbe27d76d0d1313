"""Memory as an affine function of the batch: a constant, and an amount for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Any

import torch

from pytest_gpumem.echo import quoted
from pytest_gpumem.measurement.statistics import unmeasured
from pytest_gpumem.prediction.largest import Runs, largest_batch
from pytest_gpumem.simulating import simulate
from pytest_gpumem.sizes import format_size

OFF_THE_LINE = 0.1
"""Part of its peak by which the largest batch may miss the line without a remark."""


@dataclass(frozen=True)
class BatchFit:
    """A fit ``peak = model_bytes + batch * bytes_per_sample``, within its range; sizes in bytes."""

    model_bytes: int
    """Bytes independent of the batch: parameters, gradients, optimizer state, workspaces."""
    bytes_per_sample: float
    residual: int
    """The largest deviation of a given size's peak from the line."""
    peaks: Mapping[int, int]
    """Peak allocated by batch size: of the given sizes that ran, or of smaller ones."""
    total_memory: int
    """Bytes that may be allocated: the device's, or the part of it that the process is allowed."""
    largest: int | None
    """The largest batch that ran; one sample more ran out of memory.

    ``None`` if it was not searched for, or if every batch that was tried ran. See
    :attr:`larger_that_ran`.
    """
    tried: Mapping[int, int | None] = field(default_factory=dict)
    """Every batch of the search: its peak allocated, ``None`` where it ran out of memory."""

    @property
    def larger_that_ran(self) -> tuple[int, ...]:
        """Batches beyond :attr:`largest` that ran all the same.

        Where free memory lies in pieces, a batch can find room where a smaller one found none.
        """
        if self.largest is None:
            return ()
        ran = (size for size, peak in self.tried.items() if peak is not None)
        return tuple(sorted(size for size in ran if size > self.largest))

    def __str__(self) -> str:
        sample = format_size(round(self.bytes_per_sample))
        within = f" (within {format_size(self.residual)})" if self.residual else ""
        line = f"{format_size(self.model_bytes)} + batch × {sample}{within}"
        if not self.tried:
            return line
        if self.largest is None:
            return f"{line}; every batch that was tried ran, up to {max(self.tried)}"
        line += f"; largest batch in {format_size(self.total_memory)}: {self.largest}"
        peak = self.tried[self.largest] or 0
        off = peak - (self.model_bytes + self.largest * self.bytes_per_sample)
        if abs(off) > OFF_THE_LINE * peak:
            line += f", which takes {format_size(peak)}: the line does not go that far"
        if not self.larger_that_ran:
            return line
        farthest = self.larger_that_ran[-1]
        return f"{line}; of larger ones up to {farthest} some ran: free memory lies in pieces"


def fit_batch(
    step: Callable[[int], Any],
    sizes: Sequence[int],
    *,
    gpu: str | None = None,
    largest: bool = True,
    in_a_row: int = 1,
) -> BatchFit:
    """Run ``step(batch)`` for each of ``sizes`` and fit a line through its peaks.

    On the CUDA device that is current, real or simulated; ``gpu`` names a model to be simulated
    instead: then ``step`` has to make its model itself, on its first call or on each. With
    ``largest`` the largest batch that fits the device is searched for, and confirmed by running it
    and the next one. Every run begins with an empty cache; training begins so only once, so that a
    batch may run once and not ``in_a_row`` times: use 3 where ``step`` is one of many.

    Nothing is charged to the calling test. Large random tensors that a step makes on the
    CPU are left unfilled where the device is simulated. Raises ``ValueError`` for fewer than two
    different sizes, ``torch.OutOfMemoryError`` where neither two of them nor smaller ones fit.
    """
    ordered = sorted(set(sizes))
    if len(ordered) < 2 or ordered[0] < 1:
        raise ValueError(
            f"sizes={quoted(list(sizes))}: give at least two different batch sizes from 1 up"
        )
    if in_a_row < 1:
        raise ValueError(f"in_a_row={quoted(in_a_row)}: give a number of runs from 1 up")
    with unmeasured(), simulate(gpu) if gpu is not None else nullcontext(), unfilled():
        runs = Runs(step, ordered[0], in_a_row)
        runs.begin()
        ordered = runs.known(ordered)
        peaks = {size: runs.peaks[size] for size in ordered}
        slope, intercept = linear_regression(ordered, list(peaks.values()))
        residual = max(abs(peaks[size] - (intercept + slope * size)) for size in ordered)
        total = int(torch.cuda.mem_get_info()[1] * torch.cuda.get_per_process_memory_fraction())
        found = largest_batch(runs, total) if largest else None
        runs.end()
    tried = {**runs.peaks, **dict.fromkeys(runs.failed)} if largest else {}
    return BatchFit(round(intercept), slope, round(residual), peaks, total, found, tried)


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
