"""CUDA graphs: the body runs once, when it is captured, and keeps its memory for replays.

Sources: aten/src/ATen/cuda/CUDAGraph.cpp and CUDAGeneratorImpl.cpp.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch

from pytest_gpumem.simulated.allocator import AllocatorError
from pytest_gpumem.simulated.allocator.blocks import SHARED_POOL, PoolId
from pytest_gpumem.simulated.allocator.timeline import StreamKey
from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError
from pytest_gpumem.simulated.machine.generators import drawn_from
from pytest_gpumem.simulated.machine.pool_contents import PoolContents
from pytest_gpumem.simulated.machine.replayed_values import Recording
from pytest_gpumem.simulated.surface.streams import cuda_error, plan_functions

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.gpu.device import Memory, SimulatedGPU
    from pytest_gpumem.simulated.simulation import Simulation

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]

RNG_BYTES = 8
"""A seed, and an offset: one int64 each."""
CLEARS_WORKSPACES = (2, 12)
"""From this release on a graph that is given up frees the cuBLAS workspaces of its stream."""
RNG_PER_CAPTURE = (2, 12)
"""From this release on a capture has them of its own, on the default stream."""
LAZY_RNG = (2, 14)
"""From this release on a capture allocates them at its first random operator."""


class PoolIds:
    """Numbers of private pools: (0, n) of those that users ask for, (n, 0) of graphs' own."""

    def __init__(self) -> None:
        self._users = self._graphs = 0

    def of_user(self) -> PoolId:
        """A new id for a pool object or handle."""
        self._users += 1
        return 0, self._users

    def of_graph(self) -> PoolId:
        """A new id for a graph that shares no pool."""
        self._graphs += 1
        return self._graphs, 0


class EveryPoolContents:
    """What is known of the memory of graphs' pools, for as long as there is a graph."""

    def __init__(self) -> None:
        self._by_index: WeakValueDictionary[int, PoolContents] = WeakValueDictionary()

    def of(self, gpu: SimulatedGPU, pool: PoolId) -> PoolContents:
        """The contents of a GPU's pools, ``pool`` among them from now on."""
        found = self._by_index.get(gpu.index)
        if found is None or found.memory is not gpu.allocator:
            found = PoolContents(gpu.simulation.values, gpu.allocator)
            self._by_index[gpu.index] = found
        found.pools.add(pool)
        return found

    def behind(self, address: int, nbytes: int) -> torch.Tensor | None:
        """All elements of what some pool has at ``address``; ``None`` where nobody knows."""
        for contents in list(self._by_index.values()):
            base = contents.behind(address, nbytes)
            if base is not None:
                return base
        return None


class Capture:
    """One capture under way, on the stream it began on and those that wait for it."""

    def __init__(self, graph: SimulatedGraph, gpu: SimulatedGPU, pool: PoolId) -> None:
        self.graph: SimulatedGraph | None = graph
        """The graph, until the capture ends: then the graph knows the capture."""
        self.gpu = gpu
        self.pool = pool
        self.stream = gpu.stream
        self.memory = gpu.allocator
        self.recording = Recording(
            gpu.simulation.values, gpu.simulation.pool_contents.of(gpu, pool)
        )
        self.under_way = True
        self.is_empty = True
        """Whether nothing was captured yet that a graph has a node for."""
        self.valid = True
        """False once something was done that a capture does not allow."""

    def abandon(self) -> None:
        """End a capture that nobody will end: its test is over."""
        self.under_way, self.graph = False, None
        self.gpu.simulation.values.recording = None
        self.memory.mark_capture_end()
        self.memory.end_allocate_to_pool(self.pool)
        self.memory.release_pool(self.pool)

    @property
    def key(self) -> StreamKey:
        """The stream it began on."""
        return self.gpu.index, self.stream


class RandomState:
    """Where graphs find the seed and offset of random operators: two small tensors.

    ======== ==================================== ========================= ==============
    torch    allocated                            on the stream             freed
    ======== ==================================== ========================= ==============
    2.6-2.11 for the first graph of a generator,  of the capture            with the last
             by capture_begin or                                            of its graphs
             register_generator_state
    2.12-13  for each capture and registered      the default one           by reset of
             generator, by capture_begin                                    the graph
    2.14-15  for each capture and generator, by   the default one           by reset of
             the first random operator                                      the graph
    ======== ==================================== ========================= ==============

    Sources: ``CUDAGeneratorState::register_graph`` of 2.6 (CUDAGeneratorImpl.cpp);
    ``init_capture_state``, which ``CUDAGraph::capture_begin`` calls for every registered generator
    once the capture is under way, in the headers of the wheels of 2.12.1 and 2.13.0 (PyTorch
    #176752), whose test_graph_memory_stats_and_use_result_after_destroy_graph finds three blocks
    of a graph without random operators; ``get_capture_state(id, create_if_not_found)`` in those of
    2.14.1 and 2.15.0, where registering is left to the operator (#176753).

    This class is the first line of the table; the captures hold what is theirs.
    """

    def __init__(self) -> None:
        self._shared: dict[object, tuple[set[int], Memory, list[int]]] = {}

    def register(self, graph: SimulatedGraph, state: object, gpu: SimulatedGPU) -> None:
        """``register_graph`` of a generator's state, up to 2.11."""
        if state not in self._shared:
            self._shared[state] = (set(), gpu.allocator, _tensors(gpu, gpu.stream))
        self._shared[state][0].add(id(graph))

    def unregister(self, graph: SimulatedGraph) -> None:
        """``unregister_graph``: the graph is gone."""
        for state, (graphs, memory, addresses) in list(self._shared.items()):
            graphs.discard(id(graph))
            if not graphs:
                _free(memory, addresses)
                del self._shared[state]


def _state_of(generator: torch.Generator | None, gpu: SimulatedGPU) -> object:
    """The state of a generator, by default of the GPU's own: generators can share one."""
    return drawn_from(torch.cuda.default_generators[gpu.index] if generator is None else generator)


def _tensors(gpu: SimulatedGPU, stream: int) -> list[int]:
    return [gpu.allocator.malloc(RNG_BYTES, stream) for _ in range(2)]


def _free(memory: Memory, addresses: list[int]) -> None:
    while addresses:
        memory.free(addresses.pop())


class SimulatedGraph:
    """``torch.cuda.CUDAGraph`` of a simulated GPU; a replay does nothing to memory."""

    _simulation: ClassVar[Simulation]

    def __init__(self, keep_graph: bool = False) -> None:
        self._keeps = keep_graph
        self._capture: Capture | None = None
        self._captured: Capture | None = None
        self._memory: Memory | None = None
        self._random: dict[object, list[int]] = {}
        """Seed and offset of the capture, by state of a generator; empty up to 2.11."""
        self._states: list[object] = []
        """Of generators that captured operators may use."""

    def capture_begin(
        self,
        pool: PoolId | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Capture the work of the current stream from here on."""
        simulation = self._simulation
        gpu = simulation.current
        if self._captured is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, "
                "create a new instance."
            )
        if gpu.version < LAZY_RNG:
            self._register(gpu, _state_of(None, gpu))
        if gpu.stream == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                "it's ok to replay them on the default stream.)"
            )
        if simulation.streams.is_capturing(gpu.index):
            raise cuda_error("the operation cannot be performed in the present state")
        chosen = SHARED_POOL if pool is None else (pool[0], pool[1])
        identity = simulation.pool_ids.of_graph() if chosen == SHARED_POOL else chosen
        capture = Capture(self, gpu, identity)
        captures = simulation.streams.captures
        try:
            gpu.allocator.begin_allocate_to_pool(
                identity, lambda stream: captures.get((gpu.index, stream)) is capture
            )
        except AllocatorError as error:
            raise RuntimeError(str(error)) from None
        gpu.allocator.is_capturing = lambda: simulation.streams.is_capturing(gpu.index)
        gpu.allocator.mark_capture_begin()
        captures[capture.key] = capture
        simulation.execution.watch(_noting_nodes(simulation))
        simulation.values.recording = self._recording
        self._capture, self._memory = capture, gpu.allocator
        if RNG_PER_CAPTURE <= gpu.version < LAZY_RNG:
            for state in self._states:
                self._random[state] = _tensors(gpu, 0)

    def _recording(self) -> Recording | None:
        simulation = self._simulation
        gpu = simulation.current
        capture = simulation.streams.captures.get((gpu.index, gpu.stream))
        return None if capture is None else capture.recording

    def capture_end(self) -> None:
        """End the capture; what it allocated stays with the graph."""
        capture = self._capture
        if capture is None:
            raise RuntimeError("capture_end() called before capture_begin().")
        streams = self._simulation.streams
        if streams.current(capture.gpu.index) != capture.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._capture, capture.graph, capture.under_way = None, None, False
        for key in [key for key, other in streams.captures.items() if other is capture]:
            del streams.captures[key]
        if not streams.captures:
            self._simulation.execution.watch(None)
            self._simulation.values.recording = None
        capture.memory.mark_capture_end()
        capture.memory.end_allocate_to_pool(capture.pool)
        if not capture.valid:
            capture.memory.release_pool(capture.pool)
            raise cuda_error("operation failed due to a previous error during capture")
        self._captured = capture
        if capture.is_empty:
            warnings.warn(_EMPTY, stacklevel=2)

    def instantiate(self) -> None:
        """Make the graph ready to run; ``capture_end`` does it unless the graph is kept."""
        if self._captured is None:
            raise RuntimeError("capture_end() must have been called before calling instantiate")
        if not self._keeps:
            raise RuntimeError(
                "instantiate() is intended to be called by the user only when keep_graph=true"
            )

    def replay(self) -> None:
        """Run the captured work again: nothing is allocated.

        Where values are computed, that is done; else what the graph writes is unknown afterwards.
        """
        if self._captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            self._captured.recording.replay()
        gpu = self._captured.gpu
        if gpu.version >= LAZY_RNG:
            # CUDAGeneratorCaptureState::setup_for_replay: a replay reads them on its own stream.
            for addresses in self._random.values():
                for address in addresses:
                    self._captured.memory.record_stream(address, gpu.stream)

    def reset(self) -> None:
        """Give the graph up: its memory can be released once no tensor needs it."""
        captured, self._captured = self._captured, None
        if self._memory is not None:
            for addresses in self._random.values():
                _free(self._memory, addresses)
            self._random.clear()
        if captured is not None:
            if captured.gpu.version >= CLEARS_WORKSPACES:
                captured.gpu.workspaces.clear_stream(captured.stream)
            captured.memory.release_pool(captured.pool)

    def pool(self) -> PoolId:
        """The id of the pool, for other graphs to share."""
        if self._captured is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._captured.pool

    def register_generator_state(self, generator: Any) -> None:
        """Let random operators of another generator be captured; since 2.14 any may be."""
        gpu = self._simulation.current
        if gpu.version < LAZY_RNG:
            self._register(gpu, _state_of(generator, gpu))

    def enable_debug_mode(self) -> None:
        """Keep what ``debug_dump`` needs: nothing here."""

    def debug_dump(self, debug_path: str) -> None:
        """Write the graph to a file: there are no kernels to write."""
        raise _unsupported("torch.cuda.CUDAGraph.debug_dump")

    def raw_cuda_graph(self) -> int:
        """The driver's graph: there is none."""
        raise _unsupported("torch.cuda.CUDAGraph.raw_cuda_graph")

    def raw_cuda_graph_exec(self) -> int:
        """The driver's graph: there is none."""
        raise _unsupported("torch.cuda.CUDAGraph.raw_cuda_graph_exec")

    def get_graph_data(self) -> dict[str, Any]:
        """The nodes of the graph: there are none."""
        raise _unsupported("torch.cuda.CUDAGraph.get_graph_data")

    def use_random_operator(self, gpu: SimulatedGPU, generator: torch.Generator | None) -> None:
        """A random operator is captured: from 2.14 on it asks for the capture's own state."""
        if gpu.version >= LAZY_RNG and (state := _state_of(generator, gpu)) not in self._random:
            self._random[state] = _tensors(gpu, 0)

    def _register(self, gpu: SimulatedGPU, state: object) -> None:
        """``register_graph`` of a generator, up to 2.13."""
        if self._simulation.streams.is_capturing(gpu.index):
            raise RuntimeError(
                "Cannot register the state during capturing stage. during CUDA graph capture. If "
                "you need this call to be captured, please file an issue. Current "
                "cudaStreamCaptureStatus: cudaStreamCaptureStatusActive"
            )
        if state in self._states:
            return
        self._states.append(state)
        if gpu.version < RNG_PER_CAPTURE:
            self._simulation.random_state.register(self, state, gpu)

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if exiting():  # what this needs may be gone, and nobody will ask for the memory
            return
        self.reset()
        self._simulation.random_state.unregister(self)


def _unsupported(name: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{name} at {user_line()} needs the driver's graph, so it cannot run on a simulated GPU"
    )


def noting_randomness(simulation: Simulation, handler: Handler) -> Handler:
    """Wrap a random operator: in a capture it may need memory for its state."""

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        streams = simulation.streams
        if streams.captures:
            gpu = simulation.current
            capture = streams.captures.get((gpu.index, gpu.stream))
            if capture is not None and capture.graph is not None:
                capture.graph.use_random_operator(gpu, kwargs.get("generator"))
        return handler(args, kwargs)

    return handle


_EMPTY = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on "
    "wrong device or stream."
)


def _noting_nodes(simulation: Simulation) -> Callable[[Any], None]:
    """Note the operators that leave a node in a graph: not those that make views, or room."""

    def ran(func: Any) -> None:
        gpu = simulation.current
        capture = simulation.streams.captures.get((gpu.index, gpu.stream))
        if capture is not None and capture.is_empty and _launches(func):
            capture.is_empty = False

    return ran


def _launches(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    aliases = [one.alias_info for one in schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return not is_view and not schema.name.startswith(("aten::empty", "aten::new_empty"))


class _Api:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def _graph_pool_handle(self) -> PoolId:
        return self._simulation.pool_ids.of_user()


def plan(simulation: Simulation, patches: Patches) -> None:
    """Replace the graph class; ``torch.cuda.graph`` and what is built on it is torch's own."""
    graph = type("CUDAGraph", (SimulatedGraph,), {"_simulation": simulation})
    for module in (torch.cuda, torch.cuda.graphs):
        patches.plan(module, "CUDAGraph", graph)
    # torch keeps one capture stream for the whole process.
    patches.plan(torch.cuda.graphs.graph, "default_capture_stream", None)
    plan_functions(_Api(simulation), patches)
