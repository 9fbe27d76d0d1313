"""Free parts of segments over time, computed from the allocator's events."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_gpumem.allocator.trace import FREE, RawEntry


class Splits:
    """The segments of one device, and their used parts.

    As in torch, only free memory in a segment that is partly in use counts, and nothing of
    expandable segments.
    """

    def __init__(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Begin with ``segments`` of a snapshot."""
        self.bytes = 0
        """Free parts of segments that are partly in use (``inactive_split_bytes``)."""
        self._addresses: list[int] = []
        self._free: dict[int, list[int]] = {}
        """By the address of a segment: its size, and its free bytes."""
        self._blocks: dict[int, tuple[int, int]] = {}
        """By the address of a block: its segment's address, and its bytes."""
        for segment in segments:
            if segment["is_expandable"]:
                continue
            address = segment["address"]
            self._get(address, segment["total_size"])
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    self._take(address, block["size"])
                address += block["size"]

    def after(self, events: Iterable[RawEntry]) -> Iterator[int]:
        """Yield the bytes after each of ``events``."""
        for action, address, size, _, context in events:
            if action == "alloc":
                self._take(address, context.nbytes if context else size)
            elif action in (FREE, "free_completed"):
                self._give(address)
            elif action == "segment_alloc":
                self._get(address, size)
            elif action == "segment_free" and address in self._free:
                self._addresses.remove(address)
                del self._free[address]
            yield self.bytes

    def _get(self, address: int, size: int) -> None:
        insort(self._addresses, address)
        self._free[address] = [size, size]

    def _take(self, address: int, nbytes: int) -> None:
        index = bisect_right(self._addresses, address) - 1
        segment = self._addresses[index] if index >= 0 else -1
        if segment < 0 or address >= segment + self._free[segment][0]:
            return  # of an expandable segment, or of none
        self._blocks[address] = segment, nbytes
        self._change(segment, -nbytes)

    def _give(self, address: int) -> None:
        if (known := self._blocks.pop(address, None)) is not None:
            self._change(*known)

    def _change(self, segment: int, nbytes: int) -> None:
        size, free = self._free[segment]
        self._free[segment][1] = now = free + nbytes
        self.bytes += (now if now < size else 0) - (free if free < size else 0)
