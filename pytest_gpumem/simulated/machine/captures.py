"""Captures of CUDA graphs that are under way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from pytest_gpumem.allocator.blocks import PoolId
from pytest_gpumem.allocator.trace import StreamKey
from pytest_gpumem.simulated.gpu.device import Device
from pytest_gpumem.simulated.machine.dispatch import Dispatch
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.views import device_tensors


class Captured(Protocol):
    """The graph that a capture is for."""

    def use_random_operator(self, gpu: Device, generator: torch.Generator | None) -> None:
        """Note that a random operator is captured."""


REPLAYED = "the replay of a CUDA graph (but on the dry device: pytest --gpumem-device=dry)"
"""The reason why the results of a graph have no values."""


class Recording:
    """The storages that captured work writes: after a replay their values are unknown."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._written: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """By key."""

    def add(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Remember the tensors that a call writes to or makes; nothing is computed now."""
        if not operator.moves_views:
            self.wrote([*operator.targets(args, kwargs), *device_tensors(result, [])])

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember that ``tensors`` are written to."""
        for tensor in tensors:
            self._written[storage_key(tensor)] = weakref.ref(tensor.untyped_storage())

    def replay(self) -> None:
        """Drop the values of the storages that are written to, and still live."""
        for key, storage in self._written.items():
            if storage() is not None:
                self._values.forget(key)


class Capture:
    """A capture under way, on the stream it began on and those that wait for it."""

    def __init__(
        self,
        graph: Captured,
        gpu: Device,
        pool: PoolId,
        values: Values,
        execution: Dispatch,
    ) -> None:
        self.graph: Captured | None = graph
        """The graph, until the capture ends: then the graph refers to the capture."""
        self.gpu = gpu
        self.pool = pool
        self.stream = gpu.stream
        self.memory = gpu.allocator
        self._values = values
        self._execution = execution
        self.recording = Recording(values)
        self.under_way = True
        self.is_empty = True
        """Whether nothing was captured yet that a graph has a node for."""
        self.valid = True
        """Whether every operation so far is allowed in a capture."""

    def replay(self) -> None:
        """Drop the values of all memory that the captured work writes."""
        self.recording.replay()
        self._values.forget_pool(self.memory, self.pool)
        if self._values.everything and self._values.uncomputed is None:
            self._values.uncomputed = REPLAYED

    def abandon(self) -> None:
        """End a capture that is still under way when its test is over."""
        self.under_way, self.graph = False, None
        self._values.recording = None
        self._execution.watch(None)
        self.memory.mark_capture_end()
        self.memory.end_allocate_to_pool(self.pool)
        self.memory.release_pool(self.pool)

    @property
    def key(self) -> StreamKey:
        """The stream it began on."""
        return self.gpu.index, self.stream


class PoolIds:
    """Numbers of private pools: (0, n) for users' pools, (n, 0) for graphs' own."""

    def __init__(self) -> None:
        self._users = self._graphs = 0

    def of_user(self) -> PoolId:
        """Return a new id for a pool object or handle."""
        self._users += 1
        return 0, self._users

    def of_graph(self) -> PoolId:
        """Return a new id for a graph that shares no pool."""
        self._graphs += 1
        return self._graphs, 0


class Pool(Protocol):
    """A pool that user code has made."""

    id: PoolId


class ActivePool(threading.local):
    """The pool of the innermost ``torch.cuda.MemPoolContext`` of each thread."""

    pool: Pool | None = None
