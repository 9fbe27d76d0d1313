"""Estimates, where only a closed library determines a size, and their share of the peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.sizes import format_size


class Estimates:
    """The estimated blocks of one device.

    Their bytes change only when such a block is allocated or freed: a peak that is reached between
    two of these events contains as many as were live then.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.live = 0
        """Estimated bytes allocated now."""
        self.clear()

    def clear(self) -> None:
        """Reset peaks and places; live blocks stay."""
        self._seen = self._highest = self._memory.peak_allocated
        self._in_peak = 0
        self._largest: tuple[int, str] | None = None
        self._latest = self._at_peak = ""

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Ignore peaks that are reached inside."""
        self._follow_peak()
        known = (self._highest, self._in_peak, self._largest, self._latest, self._at_peak)
        try:
            yield
        finally:
            self._seen = self._memory.peak_allocated
            self._highest, self._in_peak, self._largest, self._latest, self._at_peak = known

    def taken(self, nbytes: int, what: str) -> None:
        """Count an allocated block of ``nbytes`` for ``what``."""
        if self._memory.allocated != self._memory.peak_allocated:
            self._follow_peak()
        self._latest = f"{what} at {user_line()}"
        if self._largest is None or nbytes > self._largest[0]:
            self._largest = (nbytes, self._latest)
        self.live += nbytes
        self._follow_peak()

    def freed(self, nbytes: int) -> None:
        """Stop counting a freed block of ``nbytes``."""
        self._follow_peak()
        self.live -= nbytes

    def hold(self, tensor: torch.Tensor, nbytes: int, what: str) -> None:
        """Count the block of ``tensor``'s storage, of ``nbytes``, until the storage dies."""
        weakref.finalize(tensor.untyped_storage(), self.freed, nbytes).atexit = False
        self.taken(nbytes, what)

    @property
    def in_peak(self) -> int:
        """The estimated bytes in the highest peak since :meth:`clear`."""
        self._follow_peak()
        return self._in_peak

    @property
    def note(self) -> str | None:
        """A sentence for readers of the numbers; ``None`` where nothing was estimated."""
        if self._largest is None:
            return None
        return estimate_note(*self._largest, self.in_peak, self._at_peak)

    def _follow_peak(self) -> None:
        peak = self._memory.peak_allocated
        if peak != self._seen:
            self._seen = peak  # may be lower: peaks were reset
            if peak > self._highest:
                self._highest, self._in_peak, self._at_peak = peak, self.live, self._latest


def estimate_note(largest: int, at_largest: str, in_peak: int, at_peak: str) -> str:
    """Return the sentence on estimates: the largest in bytes, and their share of the peak."""
    if in_peak:
        return f"{format_size(in_peak)} of the peak are an estimate: {at_peak}"
    return (
        f"reserved memory contains estimates, of up to {format_size(largest)} at once: {at_largest}"
    )
