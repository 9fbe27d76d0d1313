"""Memory as an affine function of the batch: the model, and so much for each sample."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import linear_regression
from typing import Any

import torch

from pytest_gpumem.echo import quoted
from pytest_gpumem.sizes import format_size

MOST_STEPS = 40
"""Runs in the search for the largest batch."""


@dataclass(frozen=True)
class BatchFit:
    """``peak = model_bytes + batch * bytes_per_sample``, as far as it goes; sizes in bytes."""

    model_bytes: int
    """What does not depend on the batch: parameters, gradients, optimizer state, workspaces."""
    bytes_per_sample: float
    residual: int
    """The most that a measured peak is off the line."""
    peaks: dict[int, int]
    """Peak allocated by batch size."""
    total_memory: int
    """Of the device."""
    largest: int | None
    """The largest batch that ran; one sample more ran out of memory.

    ``None`` if not searched, not found, or if memory does not grow with the batch.
    """

    def __str__(self) -> str:
        sample = format_size(round(self.bytes_per_sample))
        text = f"{format_size(self.model_bytes)} + batch × {sample}"
        if self.residual:
            text += f" (within {format_size(self.residual)})"
        if self.largest is not None:
            text += f"; largest batch in {format_size(self.total_memory)}: {self.largest}"
        return text


def fit_batch(
    step: Callable[[int], Any],
    sizes: Sequence[int],
    *,
    gpu: str | None = None,
    largest: bool = True,
) -> BatchFit:
    """Run ``step(batch)`` for each of ``sizes`` and fit a line through its peaks.

    On the CUDA device that is current, real or simulated; ``gpu`` names a model to be simulated
    instead: then ``step`` has to make its model itself, on its first call. With ``largest`` the
    largest batch that fits the device is searched for, and confirmed by running it and the next
    one. Raises ``ValueError`` for fewer than two different sizes, ``torch.OutOfMemoryError`` where
    one of them does not fit.
    """
    ordered = sorted(set(sizes))
    if len(ordered) < 2 or ordered[0] < 1:
        raise ValueError(
            f"sizes={quoted(list(sizes))}: give at least two different batch sizes from 1 up"
        )
    if gpu is None:
        context: Any = nullcontext()
    else:
        from pytest_gpumem.simulated.run import simulate

        context = simulate(gpu)
    with context:
        step(ordered[0])  # what is made once: optimizer state, workspaces
        peaks = {size: _peak(step, size) for size in ordered}
        slope, intercept = linear_regression(ordered, [peaks[size] for size in ordered])
        residual = max(abs(peaks[size] - (intercept + slope * size)) for size in ordered)
        _, total = torch.cuda.mem_get_info()
        searched = largest and slope > 0  # else there is no largest
        expected = int((total - intercept) // slope) if searched else 0
        found = _largest(step, ordered[-1], expected) if searched else None
    return BatchFit(round(intercept), slope, round(residual), peaks, total, found)


def _peak(step: Callable[[int], Any], size: int) -> int:
    _tidy()
    torch.cuda.reset_peak_memory_stats()
    step(size)
    return int(torch.cuda.max_memory_allocated())


def _tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _fits(step: Callable[[int], Any], size: int) -> bool:
    _tidy()
    try:
        step(size)
    except torch.OutOfMemoryError:
        return False
    return True


def _largest(step: Callable[[int], Any], known: int, expected: int) -> int | None:
    """Return the batch that fits and whose next one does not, ``None`` where none was found.

    ``known`` fits; the line says ``expected``. Fragmentation can take a little of it.
    """
    fits, fails = known, 0
    candidate = max(expected, known + 1)
    for _ in range(MOST_STEPS):
        if _fits(step, candidate):
            fits = candidate
        else:
            fails = candidate
        if fails == fits + 1:
            return fits
        # First a stride on each side of what is expected, then halves of what is between.
        stride = max((candidate - known) // 64, 1)
        candidate = (fits + fails) // 2 if fails and fits > known else _next(fits, fails, stride)
    return None


def _next(fits: int, fails: int, stride: int) -> int:
    return max(fails - stride, fits + 1) if fails else fits + stride
