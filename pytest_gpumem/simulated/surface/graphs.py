"""``torch.cuda.CUDAGraph``; ``torch.cuda.graph`` and all code on top of it is torch's own."""

from __future__ import annotations

import torch

from pytest_gpumem.allocator.blocks import PoolId
from pytest_gpumem.simulated.common.patching import Patches, add_functions
from pytest_gpumem.simulated.machine.graphs import Graph
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


class _Api:
    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def _graph_pool_handle(self) -> PoolId:
        return self._machine.pool_ids.of_user()


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the graph class."""
    graph = type("CUDAGraph", (Graph,), {"_machine": machine})
    for module in (torch.cuda, torch.cuda.graphs):
        patches.add(module, "CUDAGraph", graph)
    # torch keeps one capture stream for the whole process.
    patches.add(torch.cuda.graphs.graph, "default_capture_stream", None)
    add_functions(_Api(machine), patches)
