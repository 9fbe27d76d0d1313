"""A fake device for tests of the meter, whose memory is allocated by explicit calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from pytest_gpumem.measurement.statistics import Block, Bytes, CudaStatistics, Reading, Readings

SEGMENT = 1000


class FakeStatistics(CudaStatistics):
    """One device with blocks of any size and segments of ``SEGMENT`` bytes."""

    def __init__(self, device: int = 0) -> None:  # nothing of torch is read
        self.device = device
        self.listeners: list[Callable[[Readings], None]] = []
        self.snapshots = 0
        self.counts_pools = False
        self._blocks: dict[int, int] = {}
        self._cublas: set[int] = set()
        self._next = 1
        self._peak = self._reserved = self._peak_reserved = self._handed_out = 0

    @property
    def allocated(self) -> int:
        return sum(self._blocks.values())

    def allocate(self, size: int, *, workspace: bool = False) -> int:
        """Allocate ``size`` bytes; return the address."""
        address, self._next = self._next, self._next + size
        self._blocks[address] = size
        self._handed_out += size
        self._peak = max(self._peak, self.allocated)
        while self._reserved < self.allocated:
            self._reserved += SEGMENT
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        if workspace:
            self._cublas.add(address)
        return address

    def free(self, address: int) -> None:
        del self._blocks[address]

    def use(self, size: int) -> None:
        """Allocate and free."""
        self.free(self.allocate(size))

    def read_and_reset_peaks(self) -> Readings:
        reading = Reading(
            Bytes(self.allocated, self._reserved),
            Bytes(self._peak, self._peak_reserved),
            self._handed_out,
            partial(tuple, (len(self._blocks), self.allocated) if self.counts_pools else ()),
        )
        self._peak, self._peak_reserved = self.allocated, self._reserved
        readings = {self.device: reading}
        for listener in self.listeners:
            listener(readings)
        return readings

    def live_blocks(self) -> frozenset[Block]:
        self.snapshots += 1
        return frozenset(Block(self.device, *item) for item in self._blocks.items())

    def synchronize(self) -> None:
        pass

    def possible_workspaces(self) -> frozenset[Block]:
        return frozenset(block for block in self.live_blocks() if block.address in self._cublas)

    def clear_workspaces(self) -> None:
        for address in self._cublas & self._blocks.keys():
            self.free(address)
        self._cublas.clear()

    def empty_cache(self) -> None:
        self._reserved = -(-self.allocated // SEGMENT) * SEGMENT

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        self.read_and_reset_peaks()
        listeners, self.listeners = self.listeners, []
        try:
            yield
        finally:
            self.read_and_reset_peaks()
            self.listeners = listeners
            self.read_and_reset_peaks()

    def forget_peaks(self) -> None:
        self._peak, self._peak_reserved = self.allocated, self._reserved
