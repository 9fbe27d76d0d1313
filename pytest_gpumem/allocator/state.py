"""The parts of an allocator: its settings, pools and scopes, and readings of its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from pytest_gpumem.allocator import releases
from pytest_gpumem.allocator.blocks import SHARED_POOL, TOO_LARGE, UNLIMITED, Block, PoolId
from pytest_gpumem.allocator.device_memory import DeviceMemory, RisingAddresses
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.private_pools import Filter, Pools
from pytest_gpumem.allocator.releases import Version
from pytest_gpumem.allocator.settings import AllocatorSettings, SettingsError
from pytest_gpumem.allocator.statistics import Stat
from pytest_gpumem.allocator.stream_uses import StreamUses
from pytest_gpumem.allocator.supply import Supply
from pytest_gpumem.allocator.trace import RawEntry, Timeline, Trace


class AllocatorState:
    """The parts of an allocator of one device; the arguments are those of ``Allocator``.

    All sizes are bytes.
    """

    # Attributes in slots: an object with more than thirty would find them by hashing.
    __slots__ = tuple(
        """
        _divisions _every _large _large_lists _live _max_split _note _only_best_fit
        _plain_below _shown_max_split _small _small_lists _split_below _supply _uses captures device
        is_capturing memory pools settings trace version
        """.split()
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
        timeline: Timeline | None = None,
    ) -> None:
        self.settings = AllocatorSettings(version=version) if settings is None else settings
        if self.settings.backend != "native":
            raise AllocatorError(
                f"backend:{self.settings.backend} is not simulated; use backend:native."
            )
        self.version = version
        self.device = device
        events: list[Any] = []
        self._note: Callable[[RawEntry], None] = events.extend
        self.trace = Trace(events)
        """Every event so far, in order."""
        self.pools = Pools(version)
        """The shared and the private pools."""
        self._every = self.pools.every
        self._small, self._large = self.pools.small, self.pools.large
        self._small_lists = self._small.free_lists
        self._large_lists = self._large.free_lists
        self._live: dict[int, Block] = {}
        place = place_segment or RisingAddresses(device)
        self.memory = DeviceMemory(total_memory, used_elsewhere, place, self.pools, self._note)
        """The memory that it holds from the device."""
        self.captures = 0
        """Captures of streams that are under way on this device (``markCaptureBegin``)."""
        self.is_capturing: Callable[[], bool] = lambda: True
        """Function that tests whether the current stream is being captured; called in captures."""
        self._uses = StreamUses(device, timeline or Timeline(), self.memory, self._in_capture)
        self._supply = Supply(device, self.pools, self.memory, self._uses)
        # torch reads this setting once, when the process first uses the device.
        self._shown_max_split = self.settings.max_split_size or -1
        self._configure()
        if self.settings.per_process_memory_fraction < 1.0:
            self.set_memory_fraction(self.settings.per_process_memory_fraction)

    @property
    def total_memory(self) -> int:
        """The device's memory."""
        return self.memory.total

    def set_settings(self, conf: str) -> None:
        """Read another configuration string at run time (``setAllocatorSettings``).

        Cached segments do not change; the memory fraction and ``max_split_size`` of the
        statistics are those of the start, as in torch.

        Raises ``SettingsError``: torch rejects it; what was read before the error holds.
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

        Raises ``AllocatorError``: ``fraction`` is not between 0 and 1.
        """
        if not 0.0 <= fraction <= 1.0:
            raise AllocatorError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        exact = fraction * self.total_memory
        if self.version >= releases.WHOLE_DEVICE_UNLIMITED and fraction >= 1.0:
            self.memory.limit = None
        elif self.version >= releases.FRACTION_ROUNDED:
            self.memory.limit = math.floor(exact + 0.5)
        else:
            self.memory.limit = int(exact)

    @property
    def memory_fraction(self) -> float:
        """The fraction of the device that may be reserved (``get_per_process_memory_fraction``)."""
        limit = self.memory.limit
        return 1.0 if limit is None else limit / self.total_memory

    def begin_allocate_to_pool(self, pool: PoolId, accepts: Filter) -> None:
        """Send allocations whose stream ``accepts`` returns true for to a private pool.

        Raises ``AllocatorError``: that is the case already, in torch's words.
        """
        self.pools.open(pool, accepts)
        self._route()

    def end_allocate_to_pool(self, pool: PoolId) -> None:
        """End the scope of :meth:`begin_allocate_to_pool`; the pool keeps its memory.

        Raises ``AllocatorError``: it was not begun, in torch's words.
        """
        self.pools.close(pool)
        reuses = self.settings.graph_capture_record_stream_reuse
        if reuses and self.version >= releases.REUSE_IN_CAPTURE:
            self._uses.end_capture(pool)
        self._route()

    def stats(self) -> dict[str, Any]:
        """Return the dict of ``torch._C._cuda_memoryStats(device)`` in this torch version."""
        return self.pools.stats(self.memory.counters, self._shown_max_split)

    def reset_peak_stats(self) -> None:
        """Set every peak to its current value (``reset_peak_memory_stats``)."""
        for tally in (self._every, self._small.tally, self._large.tally):
            tally.reset_peaks()
        for stat in self._rare_stats():
            stat.peak = stat.current

    def reset_accumulated_stats(self) -> None:
        """Set counters that only grow to 0 (``reset_accumulated_memory_stats``)."""
        self.memory.counters.reset_counts()
        for tally in (self._small.tally, self._large.tally):
            tally.reset_totals()
        for stat in self._rare_stats():
            stat.reset_totals()

    def _rare_stats(self) -> Iterator[Stat]:
        yield self.memory.counters.oversize_allocations
        yield self.memory.counters.oversize_segments
        for scopes in self.pools.reserved.values():
            yield from scopes.values()

    @property
    def allocated(self) -> int:
        """Bytes in live blocks (``memory_allocated``)."""
        return self._every.bytes

    @property
    def reserved(self) -> int:
        """Bytes held from the device (``memory_reserved``)."""
        return self._every.reserved

    @property
    def active(self) -> int:
        """Bytes in live blocks, and in freed ones that another stream may still use."""
        return self._every.bytes + self._every.pending["bytes"]

    @property
    def inactive_split(self) -> int:
        """Bytes of free parts of segments that are partly in use (``inactive_split_bytes``)."""
        return self._every.split_bytes

    @property
    def requested(self) -> int:
        """Bytes requested for the active blocks."""
        return self._every.requested

    @property
    def peak_allocated(self) -> int:
        """Highest :attr:`allocated` since the last reset (``max_memory_allocated``)."""
        return self._every.highest

    @property
    def peak_reserved(self) -> int:
        """Highest :attr:`reserved` since the last reset (``max_memory_reserved``)."""
        return self._every.reserved_peak

    def block(self, address: int) -> int:
        """Return the size of the live block that starts at ``address``, in bytes."""
        found = self._live.get(address) or self._uses.live.get(address)
        if found is None:
            raise self._not_live(address)
        return found.size

    def pool_of(self, address: int) -> PoolId:
        """Return the pool of the live block at ``address``; the shared one where there is none."""
        found = self._live.get(address) or self._uses.live.get(address)
        return SHARED_POOL if found is None else found.free_list.pool.identity

    def pool_addresses(self, pool: PoolId) -> set[int]:
        """Return the addresses of a private pool's live blocks (``checkPoolLiveAllocations``)."""
        identity = self.pools.get(pool).identity
        return {
            block.address
            for block in self._live_ones()
            if block.free_list.pool.identity == identity
        }

    def live_blocks(self) -> dict[int, int]:
        """Return the address and size of every live block."""
        return {block.address: block.size for block in self._live_ones()}

    def live_contexts(self) -> dict[int, Any]:
        """Return the contexts that ``malloc`` was given for live blocks, by address."""
        return {block.address: block.context for block in self._live_ones()}

    def every_block(self) -> Iterator[Block]:
        """Yield live and free blocks, in no order."""
        yield from self._live.values()
        yield from self._uses.blocks()
        for pool in self.pools:
            for free_list in pool.free_lists.values():
                yield from free_list.blocks.values()

    def is_pending(self, block: Block) -> bool:
        """Return whether the block was freed and another stream may still use it."""
        live = self._live.get(block.address), self._uses.live.get(block.address)
        return not block.key and block not in live

    def _configure(self) -> None:
        settings = self.settings
        divisions = settings.roundup_power2_divisions
        self._divisions = divisions if any(divisions) else None
        self._max_split = settings.max_split_size or UNLIMITED
        self._split_below = UNLIMITED if settings.expandable_segments else self._max_split
        self.pools.split(freely=settings.expandable_segments)
        self._supply.configure(settings)
        self._only_best_fit = self._supply.only_best_fit
        self._route()

    def _route(self) -> None:
        """Set whether requests take the short way through ``malloc``, if no special case applies.

        Requests below ``_plain_below`` are rounded to 512 bytes and go to the shared pools, and
        no freed block waits for a stream.
        """
        plain = self._divisions is None and not self.pools.scopes and not self._uses.waiting
        self._plain_below = TOO_LARGE if plain else 0

    def _in_capture(self) -> bool:
        """Return whether allocation must not query events (``is_capture_context``).

        Up to 2.12 any open scope counts, from 2.13 on only the capture of the current stream.
        """
        if self.version < releases.CAPTURE_OF_STREAM:
            return bool(self.pools.scopes)
        return self.captures > 0 and self.is_capturing()

    def _live_ones(self) -> Iterator[Block]:
        return chain(self._live.values(), self._uses.live.values())

    def _not_live(self, address: int) -> AllocatorError:
        return AllocatorError(
            f"Address {address:#x} is not a live block of device {self.device}:"
            " it was never allocated, or it was freed already."
        )
