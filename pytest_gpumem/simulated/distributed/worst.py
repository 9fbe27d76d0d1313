"""The search for the rank with the highest peak, by running few of them; imports no torch.

Ranks with the same allocations have the same peak. So the first and the last one run; if they
differ, one between them runs, and so on, until ranks that have run are alike or next to each
other: ranks between two that are alike are assumed to be like them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from pytest_gpumem.sizes import format_size

MOST_RUNS = 16
"""Ranks that are run to find the worst."""


def worst_of(peaks: Mapping[int, int]) -> int:
    """Return the rank with the highest peak, in bytes; of several the first."""
    return max(peaks, key=lambda rank: (peaks[rank], -rank))


def imbalance(peaks: Mapping[int, int]) -> str:
    """Return a sentence on how evenly memory is spread over ranks; their peaks are in bytes.

    The excess of the largest over the mean is called percent imbalance (Pearce et
    al., Quantifying the Effectiveness of Load Balance Algorithms, ICS 2012).
    """
    most, least = worst_of(peaks), min(peaks, key=lambda rank: (peaks[rank], rank))
    if peaks[most] == peaks[least]:
        return f"all {len(peaks)} ranks ran and take the same, {format_size(peaks[most])}"
    over = peaks[most] * len(peaks) / sum(peaks.values()) - 1
    return (
        f"all {len(peaks)} ranks ran; rank {most} has the highest peak, "
        f"{format_size(peaks[most])}, {over:.1%} over the mean, and rank {least} the lowest, "
        f"{format_size(peaks[least])}"
    )


class RankPeak(NamedTuple):
    """The memory and events of one rank."""

    peak_allocated: int
    events_hash: int
    """A hash of its allocator's events."""


class Worst:
    """The ranks of ``size`` that have run, and the rank to run next."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        """The rank that runs now."""
        self._taken: dict[int, RankPeak] = {}

    def note(self, taken: RankPeak) -> None:
        """Record the numbers of the present rank."""
        self._taken[self.rank] = taken

    def next(self) -> int | None:
        """Return the rank to run next; ``None`` if the present one has the highest peak."""
        rank = self.unknown()
        if rank is None and self.rank != self.found:
            return self.found
        return rank

    def unknown(self) -> int | None:
        """Return a rank that has to be run before the worst is known; ``None`` once it is."""
        return next((rank for rank in self._candidates() if rank not in self._taken), None)

    @property
    def sentence(self) -> str:
        """The sentence on the ranks that ran to find the worst."""
        ran = sorted(self._taken)
        listed = ", ".join(map(str, ran))
        if len(ran) == self.size:
            return f"rank {self.found} has the highest peak of {self.size} ranks, all of which ran"
        alike = len({self._taken[rank].events_hash for rank in ran}) == 1
        how = "made the same allocations" if alike else "differ"
        return (
            f"rank {self.found} has the highest peak of {self.size} ranks: {listed} ran and {how}; "
            "a rank between two that made the same allocations was not run"
            + ("" if len(ran) < MOST_RUNS else f", and no more than {MOST_RUNS} were run")
        )

    @property
    def found(self) -> int:
        """The rank with the highest peak of those that have run."""
        return worst_of({rank: taken.peak_allocated for rank, taken in self._taken.items()})

    def _candidates(self) -> Iterator[int]:
        yield from (0, self.size - 1)
        if len(self._taken) >= MOST_RUNS:
            return
        for low, high in pairwise(sorted(self._taken)):
            if high - low > 1 and self._taken[low].events_hash != self._taken[high].events_hash:
                yield (low + high) // 2
