"""The caching allocator of one GPU, with Python's stacks, exceptions and garbage collection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_gpumem.allocator import Allocator, OutOfMemory
from pytest_gpumem.allocator.blocks import SHARED_POOL, PoolId
from pytest_gpumem.allocator.trace import Contexts, Recording
from pytest_gpumem.garbage import GROWTH, Collector
from pytest_gpumem.simulated.common.callsite import RELEASED, Provenance, provenance


class Memory(Allocator):
    """The caching allocator, with stacks, and torch's own exception when the GPU is full.

    Python's garbage collector may run in the middle of an operation of this class and free blocks
    of the storages that it finds. In C++ that cannot happen, so such a free waits until the
    operation has ended.
    """

    history = True
    """Whether allocations remember where in the code they were made."""
    collector: Collector | None = None
    """Called when the number of blocks has grown much; ``None`` where CPython itself collects."""
    growth = 0
    """Blocks made since the last call less those freed, never below zero, as CPython counts."""

    _recording: Recording | None = None
    """The latest arguments of ``_record_memory_history``."""
    _records_frees = False
    """Whether frees record their stacks, too: ``_record_memory_history(context="all")``."""

    def __init__(self, total_memory: int, **options: Any) -> None:
        self._busy = False
        self.observers: list[Callable[[int, int, int, int], object]] = []
        """Called with device, bytes of the segment, allowed and free bytes when memory runs out."""
        self._delayed_frees: deque[tuple[int, Any]] = deque()
        super().__init__(total_memory, **options)

    def malloc(self, size: int, stream: int = 0, context: object = None) -> int:
        """Allocate ``size`` bytes; raises ``torch.OutOfMemoryError``."""
        self.growth += 1
        has_grown = self.growth > GROWTH and self.collector is not None
        if context is None and self.history:
            context = provenance()
        if self._recording is not None and isinstance(context, Provenance):
            context.record(self._recording)
        self._busy = True
        try:
            address = Allocator.malloc(self, size, stream, context)
            if address and isinstance(context, Provenance):
                context.nbytes = self.block(address)
        except OutOfMemory as error:
            if error.tried_everything and self.observers:
                # oom_observers_ (c10/cuda/CUDACachingAllocator.cpp), before the error.
                self._busy = False
                fields = error.fields
                allowed = fields.total if fields.limit is None else fields.limit
                for observer in tuple(self.observers):
                    observer(self.device, fields.segment, allowed, fields.free)
            raise torch.OutOfMemoryError(str(error)) from None
        finally:
            self._busy = False
            if self._delayed_frees:
                self._run_delayed_frees()
        if has_grown and self.collector is not None:  # after the allocation, as on the dry device
            self.growth = 0
            self.collector.grown()
        return address

    def free(self, address: int, context: Any = None) -> None:
        """Free a block, once the operation that is under way has ended."""
        if self.growth:
            self.growth -= 1
        if context is None and self._records_frees:
            context = self._context_of_free()
        if self._busy:
            self._delayed_frees.append((address, context))
            return
        self._busy = True
        try:
            Allocator.free(self, address, context)
        finally:
            self._busy = False
            if self._delayed_frees:
                self._run_delayed_frees()

    def empty_cache(self, pool: PoolId = SHARED_POOL, context: Any = None) -> None:
        """Return every segment without a live block to the device."""
        if context is None and self._records_frees:
            context = self._context_of_free()
        with self._undisturbed():
            super().empty_cache(pool, context)

    def record_history(self, recording: Recording, *, clear: bool = False) -> None:
        """Start or stop recording, as ``torch.cuda.memory._record_memory_history`` does."""
        self.trace.record(recording, clear=clear)
        self._recording = recording
        self._records_frees = recording.on and recording.contexts is Contexts.ALL

    def _context_of_free(self) -> Provenance:
        context = provenance()
        context.operator = RELEASED
        if self._recording is not None:
            context.record(self._recording)
        return context

    def segments(self, pool: PoolId = SHARED_POOL, *, frames: bool = True) -> list[dict[str, Any]]:
        """Describe the segments and their blocks, by address."""
        with self._undisturbed():
            return super().segments(pool, frames=frames)

    def live_blocks(self) -> dict[int, int]:
        """Return address and size of every live block."""
        with self._undisturbed():
            return super().live_blocks()

    def live_contexts(self) -> dict[int, Any]:
        """Return address and context of every live block."""
        with self._undisturbed():
            return super().live_contexts()

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self._run_delayed_frees()

    def _run_delayed_frees(self) -> None:
        freed = self._delayed_frees
        self._busy = True
        try:
            while freed:
                Allocator.free(self, *freed.popleft())
        finally:
            self._busy = False
