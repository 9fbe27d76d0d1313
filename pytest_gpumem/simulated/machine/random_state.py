"""Memory for the seed and offset of random operators in graphs.

Source: aten/src/ATen/cuda/CUDAGeneratorImpl.cpp.
"""

from __future__ import annotations

import torch

from pytest_gpumem.simulated.gpu.device import Device
from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.simulated.machine.generators import drawn_from

RNG_BYTES = 8
"""A seed, and an offset: one int64 each."""


class RandomState:
    """The two small tensors with the seed and offset of a graph's random operators.

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

    This class is the first line of the table; the captures hold the memory of the others.
    """

    def __init__(self) -> None:
        self._shared: dict[object, tuple[set[int], Memory, list[int]]] = {}

    def register(self, graph: object, state: object, gpu: Device) -> None:
        """Run ``register_graph`` of a generator's state, up to 2.11."""
        known = self._shared.get(state)
        # A test before this one may have left a graph, in a memory that is no longer the GPU's.
        if known is None or known[1] is not gpu.allocator:
            self._shared[state] = (set(), gpu.allocator, state_tensors(gpu, gpu.stream))
        self._shared[state][0].add(id(graph))

    def unregister(self, graph: object) -> None:
        """``unregister_graph``: the graph is gone."""
        for state, (graphs, memory, addresses) in list(self._shared.items()):
            graphs.discard(id(graph))
            if not graphs:
                free_all(memory, addresses)
                del self._shared[state]


def state_of(generator: torch.Generator | None, gpu: Device) -> object:
    """Return the state of a generator, by default of the GPU's own: generators can share one."""
    return drawn_from(torch.cuda.default_generators[gpu.index] if generator is None else generator)


def state_tensors(gpu: Device, stream: int) -> list[int]:
    """Allocate both; return their addresses."""
    return [gpu.allocator.malloc(RNG_BYTES, stream) for _ in range(2)]


def free_all(memory: Memory, addresses: list[int]) -> None:
    """Free ``addresses``, the last first; the list is empty then."""
    while addresses:
        memory.free(addresses.pop())
