"""The largest batch that fits a device: bracketed by allocator readings, then bisected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

FARTHEST = 4
"""Times the largest batch that ran is the next one to be tried: a step may make its samples on the
host, whose memory has to hold them."""
MOST_GROWTH = 1 << 16
"""Times the largest of the given sizes is the largest batch that is tried at all."""
NEIGHBOURS = (-0.05, -0.02, 0.02, 0.05)
"""Sizes, relative to the largest batch, that are tried too: fragmentation is not monotonic."""


class Runs:
    """Runs of ``step`` and their results by batch size.

    Each begins with an empty cache and without workspaces: a step that makes all it needs itself
    runs as it would in a process of its own.
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

        One that does not fit gives way to its half; raises ``torch.OutOfMemoryError`` where a
        batch of one does not fit.
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
            _tidy()
        _tidy()
        self._at_rest = _held()

    def end(self) -> None:
        """Leave the device in the state after the smallest batch."""
        self._restore()
        torch.cuda.reset_peak_memory_stats()

    def fits(self, size: int) -> bool:
        """Return whether a batch runs, as it did before if it has been tried."""
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
        """Return those of ``sizes`` that run, and smaller ones where these are fewer than two.

        Raises ``torch.OutOfMemoryError`` where there are no two.
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
        """Restore the state before every run: a failed one has left gradients, for instance."""
        _empty()
        if _held() == self._at_rest:
            return
        _tidy()
        if _held() != self._at_rest:
            self._step(self._smallest)
            _tidy()


def largest_batch(runs: Runs, total: int) -> int | None:
    """Return a batch that fits and whose next one does not.

    Where fragmentation lets a smaller one fail, it is a smaller one. ``runs`` contains some that
    fit; ``total`` are the bytes of the device. ``None`` where no batch up to :data:`MOST_GROWTH`
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
    """Return a batch that does not fit; batches that fit on the way are recorded.

    The next one to try is where the line through the two largest that ran reaches ``total``.
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
        if candidate <= low:  # it fits against the prediction: go on in growing strides
            stride = 2 * stride or max(low // 64, 1)
            candidate = low + stride
        if not runs.fits(candidate):
            return candidate
        low = candidate
    return None


def _bisected(runs: Runs, high: int) -> int:
    """Return a batch below ``high``, which does not fit, that fits and whose next one does not.

    The expected batch is mostly close to the result: first down from ``high`` in growing strides.
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


def _tidy() -> None:
    gc.collect()
    _empty()


def _empty() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _held() -> tuple[int, int]:
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
