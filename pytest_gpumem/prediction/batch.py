"""Memory as an affine function of the batch, and the largest batch that fits a device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Any

import torch

from pytest_gpumem.measurement.statistics import unmeasured
from pytest_gpumem.quoting import quoted
from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulating import simulate
from pytest_gpumem.sizes import format_size

FARTHEST = 4
"""The largest factor from one tried batch to the next: a step may make its samples on the host,
whose memory is limited."""
MOST_GROWTH = 1 << 16
"""The largest factor from the largest given size to a tried batch."""
NEIGHBOURS = (-0.05, -0.02, 0.02, 0.05)
"""Further sizes to try, relative to the largest batch, as fragmentation is not monotonic."""


class Runs:
    """Runs of ``step`` and their results by batch size.

    Each begins with an empty cache and without workspaces, so that a step that makes its own model
    runs as in a new process.
    """

    def __init__(self, step: Callable[[int], Any], smallest: int, in_a_row: int = 1) -> None:
        self._step = step
        self._smallest = smallest
        self._in_a_row = in_a_row
        self._at_rest = (0, 0)
        self.peaks: dict[int, int] = {}
        """Peak allocated of the batches that ran, in bytes."""
        self.failed: set[int] = set()
        """Batches that ran out of memory."""

    def begin(self) -> None:
        """Run the smallest batch, which makes one-time allocations: optimizer state, workspaces.

        If it does not fit, it is halved; raises ``torch.OutOfMemoryError`` if a batch of one does
        not fit.
        """
        while True:
            try:
                self._step(self._smallest)
                break
            except torch.OutOfMemoryError:
                if self._smallest == 1:
                    raise
            self.failed.add(self._smallest)
            self._smallest //= 2
            _reset()
        _reset()
        self._at_rest = _held()

    def end(self) -> None:
        """Leave the device in the state after the smallest batch."""
        self._restore()
        torch.cuda.reset_peak_memory_stats()

    def fits(self, size: int) -> bool:
        """Return whether a batch runs; a batch that has been tried does not run again."""
        if size not in self.peaks and size not in self.failed:
            self._restore()
            torch.cuda.reset_peak_memory_stats()
            try:
                for _ in range(self._in_a_row):
                    self._step(size)
            except torch.OutOfMemoryError:
                self.failed.add(size)
            else:
                self.peaks[size] = int(torch.cuda.max_memory_allocated())
        return size in self.peaks

    def known(self, sizes: Sequence[int]) -> list[int]:
        """Return those of ``sizes`` that run, with smaller sizes if these are fewer than two.

        Raises ``torch.OutOfMemoryError`` if there are not two.
        """
        running = [size for size in sizes if self.fits(size)]
        smaller = self._smallest
        while len(running) < 2 and smaller > 1:
            smaller = min(smaller, *running, *self.failed) // 2 or 1
            if self.fits(smaller):
                running.append(smaller)
        if len(running) < 2:
            raise torch.OutOfMemoryError(
                f"batches of {sorted(self.failed)} run out of memory: there are no two to compare"
            )
        return sorted(running)

    def _restore(self) -> None:
        """Restore the state before a run: a failed one may have left gradients."""
        _empty()
        if _held() == self._at_rest:
            return
        _reset()
        if _held() != self._at_rest:
            self._step(self._smallest)
            _reset()


def largest_batch(runs: Runs, total: int) -> int | None:
    """Return a batch that fits, while one sample more does not.

    It may be smaller than others that fit, because of fragmentation. ``runs`` contains some batches
    that fit; ``total`` are the bytes of the device. ``None`` if no batch up to :data:`MOST_GROWTH`
    times the known ones fails.
    """
    high = min(runs.failed) if runs.failed else _failing(runs, total)
    if high is None:
        return None
    found = _bisected(runs, high)
    shares = (found + round(share * found) for share in NEIGHBOURS)
    for size in (found - 1, found + 2, found + 3, *shares):
        if size > 0:
            runs.fits(size)
    if min(runs.failed) < found:
        found = _bisected(runs, min(runs.failed))
    return found or None


def _failing(runs: Runs, total: int) -> int | None:
    """Return a batch that does not fit; tried batches that fit are recorded.

    Each try is the batch at which the line through the two largest that ran reaches ``total``.
    """
    low = max(runs.peaks)
    most = low * MOST_GROWTH
    stride = 0
    while low < most:
        (before, lower), (last, upper) = sorted(runs.peaks.items())[-2:]
        candidate = FARTHEST * low
        if upper > lower:
            expected = last + (total - upper) * (last - before) // (upper - lower)
            candidate = min(expected, candidate)
        if candidate <= low:  # it fits, unlike predicted: continue in growing steps
            stride = 2 * stride or max(low // 64, 1)
            candidate = low + stride
        if not runs.fits(candidate):
            return candidate
        low = candidate
    return None


def _bisected(runs: Runs, high: int) -> int:
    """Return a batch below ``high`` that fits, while one sample more does not; ``high`` does not.

    The result is usually close to ``high``: first go down from there in growing steps.
    """
    low = max((size for size in runs.peaks if size < high), default=0)
    stride = max((high - low) // 64, 1)
    while high - low > 1:
        middle = max(high - stride, (low + high) // 2)
        stride *= 2
        if runs.fits(middle):
            low = middle
        else:
            high = middle
    return low


def _reset() -> None:
    gc.collect()
    _empty()


def _empty() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _held() -> tuple[int, int]:
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


OFF_THE_LINE = 0.1
"""The part of its peak by which the largest batch may deviate from the line without a remark."""


@dataclass(frozen=True)
class BatchFit:
    """A fit ``peak = model_bytes + batch * bytes_per_sample``, within its range; sizes in bytes."""

    model_bytes: int
    """Bytes independent of the batch: parameters, gradients, optimizer state, workspaces."""
    bytes_per_sample: float
    residual: int
    """The largest deviation of a given size's peak from the line."""
    peaks: Mapping[int, int]
    """Peak allocated by batch size, for the given sizes that ran or for smaller ones."""
    total_memory: int
    """Bytes that may be allocated: the device's memory, or the process's part of it."""
    largest: int | None
    """The largest batch that ran; one sample more ran out of memory.

    ``None`` if it was not searched for, or if every batch that was tried ran. See
    :attr:`larger_that_ran`.
    """
    tried: Mapping[int, int | None] = field(default_factory=dict)
    """The peak allocated of every tried batch, ``None`` if it ran out of memory."""

    @property
    def larger_that_ran(self) -> tuple[int, ...]:
        """Batches larger than :attr:`largest` that ran.

        With fragmentation, a batch can fit although a smaller one does not.
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
        more = f"some larger batches, up to {farthest}, ran as well"
        return f"{line}; {more}: it depends on fragmentation"


def fit_batch(
    step: Callable[[int], Any],
    sizes: Sequence[int],
    *,
    gpu: str | None = None,
    largest: bool = True,
    in_a_row: int = 1,
) -> BatchFit:
    """Run ``step(batch)`` for each of ``sizes`` and fit a line through its peaks.

    It runs on the current CUDA device, real or simulated; ``gpu`` names a model to simulate
    instead: then ``step`` has to make its model itself, on its first call or on each. With
    ``largest`` the largest batch that fits the device is searched for, and confirmed by running it
    and the next one. Every run begins with an empty cache, unlike the steps of a training, in which
    a batch may fit once and not repeatedly: use ``in_a_row=3`` if ``step`` is one of many.

    Nothing is charged to the calling test. Large random tensors that a step makes on the CPU are
    left unfilled if the device is simulated. Raises ``ValueError`` for fewer than two different
    sizes, ``torch.OutOfMemoryError`` if neither two of them nor smaller ones fit.
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
    """Leave large random tensors on the CPU uninitialised, if the GPU computes nothing.

    This is for runs in which only memory matters. A step that makes its model on the CPU needs half
    of its time for random weights, and samples for the largest batch of a large GPU would need more
    memory than a laptop has. Does nothing outside a simulation.
    """
    from pytest_gpumem.simulated.simulation import active_simulation

    machine = active_simulation()
    computes = machine is None or machine.values.everything
    with nullcontext() if computes else having(machine, "leaves_unfilled", True):
        yield
