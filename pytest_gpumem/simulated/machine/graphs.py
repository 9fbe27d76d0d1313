"""CUDA graphs: the body runs once, when it is captured, and keeps its memory for replays.

Sources: aten/src/ATen/cuda/CUDAGraph.cpp and CUDAGeneratorImpl.cpp, torch 2.6 to 2.15.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from pytest_gpumem.allocator import AllocatorError
from pytest_gpumem.allocator.blocks import SHARED_POOL, PoolId
from pytest_gpumem.simulated.common.callsite import refusing
from pytest_gpumem.simulated.gpu.device import GpuState
from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.simulated.gpu.releases import CLEARS_WORKSPACES, LAZY_RNG, RNG_PER_CAPTURE
from pytest_gpumem.simulated.machine.generators import (
    free_all,
    refused_in_capture,
    state_of,
    state_tensors,
)
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.pool_contents import GraphRecording
from pytest_gpumem.simulated.machine.streams import Capture, cuda_error

_EMPTY = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on "
    "wrong device or stream."
)


class Graph:
    """The C++ class of ``torch.cuda.CUDAGraph`` on a simulated GPU; a replay allocates nothing."""

    _machine: ClassVar[SimulatedMachine]

    def __new__(cls, *args: object, **options: object) -> Graph:
        """Return a graph; torch's Python class passes its arguments here, too."""
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self._keeps = keep_graph
        self._has_graph_exec = self._is_final = False
        self._capture: Capture | None = None
        self._captured: Capture | None = None
        self._memory: Memory | None = None
        self._random: dict[object, list[int]] = {}
        """Seed and offset of the capture, by state of a generator; empty up to 2.11."""
        self._drawn: set[object] = set()
        """The states that random operators of the capture have used, since 2.14."""
        self._states: list[object] = []
        """The states of generators that captured operators may use."""
        self._more_pools: list[PoolId] = []
        """Further pools that the capture has used, which live as long as it does."""

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """Capture the work of the current stream from now on."""
        machine = self._machine
        gpu = machine.current
        if self._captured is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, "
                "create a new instance."
            )
        if gpu.version < LAZY_RNG:
            self._register(gpu, state_of(None, gpu))
        if gpu.stream == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                "it's ok to replay them on the default stream.)"
            )
        if machine.streams.is_capturing(gpu.index):
            raise cuda_error("the operation cannot be performed in the present state")
        chosen = SHARED_POOL if pool is None else (pool[0], pool[1])
        identity = (next(machine.graph_pools), 0) if chosen == SHARED_POOL else chosen
        recording = GraphRecording(machine.values, machine.pool_contents.of(gpu, identity))
        capture = Capture(gpu, identity, recording, self)
        captures = machine.streams.captures
        try:
            gpu.allocator.begin_allocate_to_pool(
                identity, lambda stream: captures.get((gpu.index, stream)) is capture
            )
        except AllocatorError as error:
            raise RuntimeError(str(error)) from None
        gpu.allocator.is_capturing = lambda: machine.streams.is_capturing(gpu.index)
        gpu.allocator.captures += 1
        captures[gpu.index, gpu.stream] = capture
        self._capture, self._memory = capture, gpu.allocator
        if RNG_PER_CAPTURE <= gpu.version < LAZY_RNG:
            for state in self._states:
                self._random[state] = state_tensors(gpu, 0)

    def capture_end(self) -> None:
        """End the capture and make the graph ready to run, unless it is kept."""
        Graph.capture_end_pre(self)
        self._has_graph_exec = not self._keeps
        Graph.capture_end_post(self)

    def capture_end_post(self) -> None:
        """Destroy the captured graph unless it is kept; its memory stays."""
        self._is_final = True

    def capture_end_pre(self) -> None:
        """End the capture; its allocations stay with the graph."""
        capture = self._capture
        if capture is None:
            raise RuntimeError("capture_end() called before capture_begin().")
        if self._machine.streams.current(capture.gpu.index) != capture.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._capture = None
        self._machine.end_capture(capture)
        if not capture.valid:
            capture.memory.pools.release(capture.pool)
            raise cuda_error("operation failed due to a previous error during capture")
        self._captured, self._is_final = capture, False
        if capture.is_empty:
            warnings.warn(_EMPTY, stacklevel=2)

    def instantiate(self) -> None:
        """Make the graph ready to run."""
        if self._captured is None:
            raise RuntimeError("capture_end() must have been called before calling instantiate")
        if self._is_final and not self._keeps:
            raise RuntimeError(
                "instantiate() is intended to be called by the user only when keep_graph=true"
            )
        self._has_graph_exec = True

    def replay(self) -> None:
        """Compute the values of the captured work, or mark them as unknown; allocate nothing."""
        if self._captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            self._captured.recording.replay(computes=self._machine.values.everything)
        # CUDAGeneratorCaptureState::setup_for_replay: a replay reads them on its own stream.
        for state in self._drawn:
            for address in self._random[state]:
                self._captured.memory.record_stream(address, self._captured.gpu.stream)

    def reset(self) -> None:
        """Release the graph's pool: its memory can be freed once no tensor needs it."""
        captured, self._captured = self._captured, None
        self._has_graph_exec = False
        if self._memory is not None:
            for addresses in self._random.values():
                free_all(self._memory, addresses)
            self._random.clear()
            self._drawn.clear()
            for pool in self._more_pools:
                self._memory.pools.release(pool)
            self._more_pools.clear()
        if captured is not None:
            if captured.gpu.version >= CLEARS_WORKSPACES:
                captured.gpu.workspaces.clear_stream(captured.stream)
            captured.memory.pools.release(captured.pool)

    def pool(self) -> PoolId:
        """Return the id of the pool, for other graphs to share."""
        if self._captured is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._captured.pool

    def pools(self) -> list[PoolId]:
        """Return the ids of all pools that the graph keeps, its own first."""
        return [Graph.pool(self), *self._more_pools]

    def _retain_pool(self, pool: PoolId) -> None:
        """Keep a pool that the capture uses (``use_mem_pool``, since 2.15) until the graph ends."""
        if self._capture is None:
            raise RuntimeError("CUDAGraph::retain_pool may only be called during capture.")
        pool = (pool[0], pool[1])
        if pool not in (self._capture.pool, *self._more_pools):
            self._capture.memory.pools.create(pool)
            self._more_pools.append(pool)

    @classmethod
    def get_currently_capturing_graph(cls) -> Graph:
        """Return the graph that the work of the current stream is captured into."""
        capture = cls._machine.capture
        if capture is None or not isinstance(capture.graph, Graph):
            raise RuntimeError("The current stream is not currently capturing.")
        return capture.graph

    def register_generator_state(self, generator: Any) -> None:
        """Allow captured operators to use ``generator`` too; since 2.14 any may be used."""
        gpu = self._machine.current
        if gpu.version < LAZY_RNG:
            self._register(gpu, state_of(generator, gpu))

    def enable_debug_mode(self) -> None:
        """Do nothing: ``debug_dump`` is refused."""

    debug_dump, raw_cuda_graph, raw_cuda_graph_exec, get_graph_data = (
        refusing(f"torch.cuda.CUDAGraph.{name}", "needs the driver's graph, which is not simulated")
        for name in ("debug_dump", "raw_cuda_graph", "raw_cuda_graph_exec", "get_graph_data")
    )

    begin_capture_to_if_node, begin_capture_to_while_node = (
        refusing(
            f"torch.cuda.CUDAGraph.{name}",
            "captures a body that a simulated GPU does not follow: run pytest --gpumem-device=dry",
        )
        for name in ("begin_capture_to_if_node", "begin_capture_to_while_node")
    )

    def use_random_operator(self, gpu: GpuState, generator: torch.Generator | None) -> None:
        """Allocate the capture's own state at its first random operator, since 2.14."""
        if gpu.version >= LAZY_RNG:
            self._drawn.add(self.use_random_state(gpu, generator))

    def use_random_state(self, gpu: GpuState, generator: torch.Generator | None) -> object:
        """Run ``get_capture_state`` of a generator, which since 2.14 makes what it misses."""
        state = state_of(generator, gpu)
        if gpu.version >= LAZY_RNG and state not in self._random:
            self._random[state] = state_tensors(gpu, 0)
        return state

    def _register(self, gpu: GpuState, state: object) -> None:
        """Run ``register_graph`` of a generator, up to 2.13."""
        if self._machine.streams.is_capturing(gpu.index):
            raise refused_in_capture("register the state during capturing stage.")
        if state in self._states:
            return
        self._states.append(state)
        if gpu.version < RNG_PER_CAPTURE:
            self._machine.random_state.register(self, state, gpu)

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if exiting():  # the modules this needs may be gone, and the memory is not used again
            return
        tracker = getattr(self, "_tracker", None)  # of torch's Python class, since 2.13
        if tracker is not None:
            tracker.stop()
        Graph.reset(self)
        self._machine.random_state.unregister(self)
