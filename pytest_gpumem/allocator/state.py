"""The parts of an allocator, and its settings.

A free in two steps: the program requests it, and it completes once no stream uses the block.

Between the two the block is pending: no longer allocated, and still active.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from pytest_gpumem.allocator.blocks import TOO_LARGE, UNLIMITED, Block, Pool
from pytest_gpumem.allocator.device_memory import DeviceMemory, RisingAddresses, SharedDevice
from pytest_gpumem.allocator.expandable import absorb
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.private_pools import Pools
from pytest_gpumem.allocator.releases import (
    CAPTURE_OF_STREAM,
    FRACTION_ROUNDED,
    WHOLE_DEVICE_UNLIMITED,
    Version,
)
from pytest_gpumem.allocator.settings import AllocatorSettings, SettingsError
from pytest_gpumem.allocator.statistics import Counters, DeviceTally, PoolTally
from pytest_gpumem.allocator.stream_uses import StreamUses
from pytest_gpumem.allocator.supply import Supply
from pytest_gpumem.allocator.trace import RawEntry, Timeline, Trace

_ignore: Callable[[object], None] = deque[object](maxlen=0).append
"""Sink of events when none are kept: a queue of length 0 costs the least."""


class AllocatorState:
    """The parts of an allocator of one device; the arguments are those of ``Allocator``."""

    # Attributes in slots: an object with more than thirty would find them by hashing.
    __slots__ = (
        "_captures",
        "_counters",
        "_divisions",
        "_every",
        "_large",
        "_large_lists",
        "_live",
        "_max_split",
        "_memory",
        "_note",
        "_only_best_fit",
        "_plain_below",
        "_pools",
        "_shown_max_split",
        "_small",
        "_small_lists",
        "_split_below",
        "_supply",
        "_uses",
        "caching",
        "device",
        "is_capturing",
        "settings",
        "trace",
        "version",
    )

    def __init__(
        self,
        total_memory: int,
        settings: AllocatorSettings | None = None,
        version: Version = (2, 13),
        device: int = 0,
        *,
        used_elsewhere: int = 0,
        place_segment: Callable[[int], int] | None = None,
        record: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self.settings = AllocatorSettings(version=version) if settings is None else settings
        refusal = self.settings.refused()
        if refusal is not None:
            raise AllocatorError(refusal)
        self.version = version
        self.device = device
        events: list[Any] = []
        self._note: Callable[[RawEntry], None] = events.extend if record else _ignore
        self.trace = Trace(events)
        """Every event so far, in order."""
        self._every = DeviceTally()
        self._counters = Counters()
        self._small, self._large = (
            Pool(small=small, split_above=0, tally=PoolTally(), every=self._every)
            for small in (True, False)
        )
        self._small_lists = self._small.free_lists
        self._large_lists = self._large.free_lists
        self._pools = Pools(version, self._small, self._large)
        self._live: dict[int, Block] = {}
        self._memory = DeviceMemory(
            total_memory,
            used_elsewhere,
            place_segment or RisingAddresses(device),
            version,
            self._pools,
            self._every,
            self._counters,
            self._note,
        )
        self._captures = 0
        self.is_capturing: Callable[[], bool] = lambda: self._captures > 0
        """Function that tests whether the current stream is being captured; called in captures."""
        self._uses = StreamUses(
            device,
            timeline or Timeline(),
            partial(complete_free, memory=self._memory),
            self._in_capture,
        )
        self._supply = Supply(
            device, version, self._pools, self._memory, self._uses, self._in_capture
        )
        self.caching = True
        """Whether memory is cached; if not, every block is the device's own and is not counted."""
        # torch reads it when the process first uses the device, and not again.
        self._shown_max_split = self.settings.max_split_size or -1
        self._configure()
        if self.settings.per_process_memory_fraction < 1.0:
            self.set_memory_fraction(self.settings.per_process_memory_fraction)

    @property
    def total_memory(self) -> int:
        """The device's memory."""
        return self._memory.total

    def share(self, shared: SharedDevice | None) -> None:
        """Take memory from ``shared`` from now on, which other processes use too."""
        self._memory.shared = shared

    @property
    def used_elsewhere(self) -> int:
        """Device memory outside this allocator: the CUDA context, other processes."""
        return self._memory.used_elsewhere

    @used_elsewhere.setter
    def used_elsewhere(self, size: int) -> None:
        self._memory.used_elsewhere = size

    def set_settings(self, conf: str) -> None:
        """Read another configuration string at run time (``setAllocatorSettings``).

        Cached segments stay what they are; the memory fraction and ``max_split_size`` of the
        statistics are those of the start, as in torch.

        Raises:
            SettingsError: torch rejects it; what was read before the error holds, as in torch.
        """
        try:
            self.settings = AllocatorSettings.parse(conf, self.version, self.settings)
        except SettingsError as error:
            self.settings = error.settings or self.settings
            raise
        finally:
            self._configure()

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to a fraction of the device (``set_per_process_memory_fraction``).

        From 2.10 on a fraction of 1 lifts the limit; from 2.13 on the limit is rounded to the
        nearest byte, before that down.

        Raises:
            AllocatorError: ``fraction`` is not between 0 and 1.
        """
        if not 0.0 <= fraction <= 1.0:
            raise AllocatorError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        if self.version >= WHOLE_DEVICE_UNLIMITED and fraction >= 1.0:
            self._memory.limit = None
            return
        exact = fraction * self.total_memory
        self._memory.limit = (
            math.floor(exact + 0.5) if self.version >= FRACTION_ROUNDED else int(exact)
        )

    @property
    def memory_fraction(self) -> float:
        """The fraction of the device that may be reserved (``get_per_process_memory_fraction``)."""
        limit = self._memory.limit
        return 1.0 if limit is None else limit / self.total_memory

    def enable_caching(self, enabled: bool) -> None:
        """Turn caching on or off, as ``torch.cuda.caching_allocator_enable``."""
        self.caching = enabled
        self._route()

    def _configure(self) -> None:
        """Apply the settings."""
        settings = self.settings
        divisions = settings.roundup_power2_divisions
        self._divisions = divisions if any(divisions) else None
        self._max_split = settings.max_split_size or UNLIMITED
        self._split_below = UNLIMITED if settings.expandable_segments else self._max_split
        self._pools.split(freely=settings.expandable_segments)
        self._supply.configure(settings)
        self._only_best_fit = self._supply.only_best_fit
        self._route()

    def _route(self) -> None:
        """Set whether requests take the short way through ``malloc``, if no special case applies.

        Requests below ``_plain_below`` are rounded to 512 bytes and go to the shared pools, and
        no freed block waits for a stream.
        """
        plain = (
            self._divisions is None
            and self.caching
            and not self._pools.scopes
            and not self._uses.waiting
        )
        self._plain_below = TOO_LARGE if plain else 0

    def _in_capture(self) -> bool:
        """Return whether allocation must do without events (``is_capture_context``).

        Up to 2.12 any open scope counts, from 2.13 on only the capture of the current stream.
        """
        if self.version < CAPTURE_OF_STREAM:
            return bool(self._pools.scopes)
        return self._captures > 0 and self.is_capturing()


def request_free(block: Block, memory: DeviceMemory, context: Any = None) -> None:
    """Mark a block as freed by the program: it is no longer allocated, but active."""
    free_list = block.free_list
    for tally in (free_list.tally, free_list.every):
        tally.change("blocks", -1)
        tally.change("bytes", -block.size)
        tally.change_pending(1, block.size)
    shown = context or block.context
    memory.note(("free_requested", block.address, block.requested, free_list.stream, shown))
    if block.size >= memory.oversize:
        memory.counters.oversize_allocations.decrease(1)


def complete_free(block: Block, memory: DeviceMemory, context: Any = None) -> None:
    """Make a block inactive: it merges with its neighbours and can be used again."""
    free_list = block.free_list
    address, size, requested = block.address, block.size, block.requested
    shown = context or block.context
    memory.note(("free_completed", address, requested, free_list.stream, shown))
    block.context = None
    gained = [absorb(block, neighbour, mapped=True) for neighbour in (block.previous, block.next)]
    free_list.add(block)
    splits, split_bytes = -sum(bytes_ > 0 for bytes_ in gained), -sum(gained)
    if block.is_split:
        splits, split_bytes = splits + 1, split_bytes + block.size
    for tally in (free_list.tally, free_list.every):
        tally.change("splits", splits)
        tally.change("split_bytes", split_bytes)
        tally.change("requested", -requested)
        tally.change_pending(-1, -size)
