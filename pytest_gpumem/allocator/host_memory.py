"""Page-locked host memory: a model of torch's CachingHostAllocator, for its statistics.

Source: aten/src/ATen/core/CachingHostAllocator.h. A block is a power of two, is never split, and is
kept for the next request of its size until the cache is emptied. Blocks that a stream still copies
from are given back at once here.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from pytest_gpumem.allocator.statistics import Stat


def block_size(size: int) -> int:
    """Return the bytes of the block for a request of ``size`` bytes: the next power of two."""
    return 1 << (size - 1).bit_length()


class HostAllocator:
    """The pinned memory of one process; sizes are bytes."""

    def __init__(self) -> None:
        self._free: dict[int, int] = {}
        """Number of cached blocks by size."""
        self._blocks = Stat()
        self._bytes = Stat()
        self._active: dict[int, tuple[Stat, Stat]] = {}
        """By size: blocks in use and their bytes."""

    def allocate(self, size: int) -> int:
        """Take a block for ``size`` bytes and return its own size; 0 for no bytes."""
        if size == 0:
            return 0
        rounded = block_size(size)
        if self._free.get(rounded):
            self._free[rounded] -= 1
        else:
            self._blocks.change(1)
            self._bytes.change(rounded)
        count, held = self._active.setdefault(rounded, (Stat(), Stat()))
        count.change(1)
        held.change(rounded)
        return rounded

    def free(self, rounded: int) -> None:
        """Give back a block of ``rounded`` bytes, which :meth:`allocate` returned."""
        if rounded:
            self._free[rounded] = self._free.get(rounded, 0) + 1
            count, held = self._active[rounded]
            count.change(-1)
            held.change(-rounded)

    def empty_cache(self) -> None:
        """Return unused blocks to the driver."""
        for size, blocks in self._free.items():
            self._blocks.change(-blocks)
            self._bytes.change(-size * blocks)
        self._free.clear()

    def reset_peak_stats(self) -> None:
        """Set every peak to its current value."""
        for stat in self._all():
            stat.reset_peak()

    def reset_accumulated_stats(self) -> None:
        """Set the totals of allocated and freed memory to 0."""
        for stat in self._all():
            stat.reset_totals()

    def stats(self, *, by_blocks: bool) -> dict[str, Any]:
        """Return the dict of ``torch.cuda.host_memory_stats_as_nested_dict()``.

        torch has renamed the quantities: ``by_blocks`` selects names for memory in use
        (``active_*``) over names for requested memory. Peaks of memory in use are the sum of each
        size's own, as in torch. Driver times are 0.
        """
        names = (
            ("active_requests", "active_bytes", "allocations", "allocated_bytes")
            if by_blocks
            else ("allocation", "allocated_bytes", "segment", "reserved_bytes")
        )
        in_use = zip(*self._active.values(), strict=True) if self._active else [(), ()]
        found = [*in_use, (self._blocks,), (self._bytes,)]
        kinds = ("current", "peak", "allocated", "freed")
        made, freed = self._blocks.allocated, self._blocks.freed
        time = {"total": 0, "max": 0, "min": 0, "avg": 0}
        return {
            **{
                name: {kind: sum(getattr(stat, kind) for stat in stats) for kind in kinds}
                for name, stats in zip(names, found, strict=True)
            },
            "num_host_alloc": made,
            "num_host_free": freed,
            "host_alloc_time": {**time, "count": made},
            "host_free_time": {**time, "count": freed},
        }

    def _all(self) -> list[Stat]:
        return [self._blocks, self._bytes, *chain.from_iterable(self._active.values())]
