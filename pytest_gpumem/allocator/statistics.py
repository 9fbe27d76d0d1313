"""Counters behind ``torch.cuda.memory_stats()``.

torch keeps current, peak, allocated and freed for nine quantities in three scopes (all, small pool,
large pool): 108 numbers. In this model a tally keeps current values and peaks, that of a pool also
the amounts removed from it (``*_out``); the rest is computed on reading. The allocator updates the
attributes in place, because a method call for each would halve its speed.

Active memory is allocated, or ``pending``: freed while another stream used it. The latter is rare,
so ``blocks`` and ``bytes`` count allocated memory, and pending is added on reading. Peaks of both
follow from the highest allocated value since pending last changed (:meth:`Tally.change_pending`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final

QUANTITIES: Final = {
    "allocation": "blocks",
    "segment": "segments",
    "active": "blocks",
    "inactive_split": "splits",
    "allocated_bytes": "bytes",
    "reserved_bytes": "reserved",
    "active_bytes": "bytes",
    "inactive_split_bytes": "split_bytes",
    "requested_bytes": "requested",
}
"""torch's quantities and their names in this module."""

_currents: Final = attrgetter(*QUANTITIES.values())
_peaks: Final = attrgetter(*(f"{field}_peak" for field in QUANTITIES.values()))
_outs: Final = attrgetter(*(f"{field}_out" for field in QUANTITIES.values()))

_WITH_PENDING: Final = tuple(
    (QUANTITIES[active], list(QUANTITIES).index(allocated), list(QUANTITIES).index(active))
    for allocated, active in (("allocation", "active"), ("allocated_bytes", "active_bytes"))
)
"""Fields that pending is added to, and which quantities are without it and with it."""


class Tally:
    """The values of one pool, or of all (scope ``all``), whose ``*_out`` are not kept."""

    __slots__ = (
        *(
            f"{field}{kind}"
            for field in dict.fromkeys(QUANTITIES.values())
            for kind in ("", "_peak", "_out")
        ),
        *("pending", "earlier_peaks", "active_peaks", "_zero"),
    )

    def __init__(self) -> None:
        self.blocks = self.blocks_peak = self.blocks_out = 0
        self.bytes = self.bytes_peak = self.bytes_out = 0
        self.requested = self.requested_peak = self.requested_out = 0
        self.splits = self.splits_peak = self.splits_out = 0
        self.split_bytes = self.split_bytes_peak = self.split_bytes_out = 0
        self.segments = self.segments_peak = self.segments_out = 0
        self.reserved = self.reserved_peak = self.reserved_out = 0
        self.pending = {"blocks": 0, "bytes": 0}
        """Blocks, and their bytes, that are no longer allocated and still active."""
        self.earlier_peaks = {"blocks": 0, "bytes": 0}
        """Highest allocated before pending last changed."""
        self.active_peaks = {"blocks": 0, "bytes": 0}
        """Highest active before pending last changed."""
        self._zero = [(0, 0)] * len(QUANTITIES)

    def change(self, field: str, amount: int) -> None:
        """Add ``amount``, which may be negative, to a field."""
        value = getattr(self, field) + amount
        setattr(self, field, value)
        setattr(self, f"{field}_peak", max(getattr(self, f"{field}_peak"), value))
        if amount < 0:
            setattr(self, f"{field}_out", getattr(self, f"{field}_out") - amount)

    def change_pending(self, blocks: int, size: int) -> None:
        """Add to the pending blocks and bytes; both may be negative.

        The current values are those after the change already. The peaks since the last change are
        recorded first.
        """
        for field, amount in (("blocks", blocks), ("bytes", size)):
            peak, pending = getattr(self, f"{field}_peak"), self.pending[field]
            self.earlier_peaks[field] = max(self.earlier_peaks[field], peak)
            self.active_peaks[field] = max(self.active_peaks[field], peak + pending)
            setattr(self, f"{field}_peak", getattr(self, field))
            self.pending[field] = pending + amount

    def currents_and_peaks(self) -> list[tuple[int, int]]:
        """Return the current value and peak of each of torch's quantities."""
        found = list(zip(_currents(self), _peaks(self), strict=True))
        for field, allocated, active in _WITH_PENDING:
            current, peak = found[allocated]
            pending = self.pending[field]
            found[active] = current + pending, max(self.active_peaks[field], peak + pending)
            found[allocated] = current, max(self.earlier_peaks[field], peak)
        return found

    @property
    def highest(self) -> int:
        """Peak of the allocated bytes."""
        return max(self.earlier_peaks["bytes"], self.bytes_peak)

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        for field in QUANTITIES.values():
            setattr(self, f"{field}_peak", getattr(self, field))
        for field, pending in self.pending.items():
            self.earlier_peaks[field] = getattr(self, field)
            self.active_peaks[field] = getattr(self, field) + pending

    def allocated_and_freed(self) -> list[tuple[int, int]]:
        """Return each quantity's sums of additions and removals since the last reset of the totals.

        In the order of :meth:`currents_and_peaks`.
        """
        return [
            (went_in - zero_in, went_out - zero_out)
            for (went_in, went_out), (zero_in, zero_out) in zip(
                self._totals(), self._zero, strict=True
            )
        ]

    def reset_totals(self) -> None:
        """Start ``allocated`` and ``freed`` again at 0."""
        self._zero = self._totals()

    def _totals(self) -> list[tuple[int, int]]:
        found = [
            (current + went_out, went_out)
            for current, went_out in zip(_currents(self), _outs(self), strict=True)
        ]
        for field, _, active in _WITH_PENDING:
            went_in, went_out = found[active]
            found[active] = went_in, went_out - self.pending[field]
        return found


class Stat:
    """A counter with current, peak, allocated and freed, for rarely counted quantities."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        """Add ``amount``, as torch's ``Stat::increase``, or its negative as ``Stat::decrease``."""
        self.current += amount
        self.peak = max(self.peak, self.current)
        if amount > 0:
            self.allocated += amount
        else:
            self.freed -= amount

    def reset_totals(self) -> None:
        """Start ``allocated`` and ``freed`` again at 0."""
        self.allocated = self.freed = 0

    def to_dict(self) -> dict[str, int]:
        """Return the four numbers under torch's names."""
        return stat_dict(self.current, self.peak, self.allocated, self.freed)


class Counters:
    """The numbers of ``memory_stats`` that have no pools."""

    def __init__(self) -> None:
        self.oversize_allocations = Stat()
        self.oversize_segments = Stat()
        self.reset_counts()

    def reset_counts(self) -> None:
        """Start every count again at 0."""
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = self.num_oom_rejections = 0


def stat_dict(current: int, peak: int, allocated: int, freed: int) -> dict[str, int]:
    """Return the four numbers under torch's names."""
    return {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
