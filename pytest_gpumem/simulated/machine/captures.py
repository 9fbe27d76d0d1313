"""Captures of CUDA graphs that are under way."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from pytest_gpumem.allocator.blocks import PoolId
from pytest_gpumem.allocator.trace import StreamKey
from pytest_gpumem.simulated.gpu.device import Device
from pytest_gpumem.simulated.machine.dispatch import Dispatch
from pytest_gpumem.simulated.machine.pool_contents import EveryPoolContents
from pytest_gpumem.simulated.machine.replayed_values import Recording
from pytest_gpumem.simulated.machine.values.known import Values


class Captured(Protocol):
    """The graph that a capture is for."""

    def use_random_operator(self, gpu: Device, generator: torch.Generator | None) -> None:
        """Note that a random operator is captured."""


class Capture:
    """A capture under way, on the stream it began on and those that wait for it."""

    def __init__(
        self,
        graph: Captured,
        gpu: Device,
        pool: PoolId,
        values: Values,
        contents: EveryPoolContents,
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
        self.recording = Recording(values, contents.of(gpu, pool))
        self.under_way = True
        self.is_empty = True
        """Whether nothing was captured yet that a graph has a node for."""
        self.valid = True
        """Whether every operation so far is allowed in a capture."""

    def abandon(self) -> None:
        """End a capture that is still under way when its test is over."""
        self.under_way, self.graph = False, None
        self._values.recording = None
        self._execution.watch(None)
        self.memory.mark_capture_end()
        self.memory.end_allocate_to_pool(self.pool)
        self.memory.pools.release(self.pool)

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
