"""A graph of Dynamo's, led through AOTAutograd and Inductor.

C++ knows the fake tensors of a GPU as ``meta`` (see ``fakes``), so a graph says ``meta`` where it
says ``cuda`` while AOTAutograd runs it, and ``cuda`` again when Inductor gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from pytest_gpumem.simulated.compiled.fakes import META, place
from pytest_gpumem.simulated.compiled.tracing import Tracing
from pytest_gpumem.simulated.compiled.triton import standing_in
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_aten = torch.ops.aten
Compiled = Callable[..., Any]


class Inductor:
    """The backend of one ``torch.compile``; ``settings`` are Inductor's, by name."""

    def __init__(
        self, machine: SimulatedMachine, tracing: Tracing, settings: Mapping[str, Any]
    ) -> None:
        self._machine = machine
        self._tracing = tracing
        self._settings = dict(settings)

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], **_: Any) -> Compiled:
        """Return what runs in the place of ``graph``."""
        _move(graph, lambda device: META if device.type == "cuda" else device)
        with standing_in():
            compiled: Compiled = compile_fx(
                graph,
                inputs,
                inner_compile=self._inner,
                config_patches=self._settings,
                decompositions=self._decompositions(),
            )
        return compiled

    def _inner(self, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        _move(graph, lambda device: place(self._machine, device))
        # The backward of a graph may be compiled when it is first needed.
        with self._tracing.entered(), standing_in():
            return compile_fx_inner(graph, inputs, **options)

    def _decompositions(self) -> dict[Any, Callable[..., Any]]:
        table = select_decomp_table()
        copy = table[_aten._to_copy.default]

        def to_copy(tensor: Any, *, device: torch.device | None = None, **options: Any) -> Any:
            if device is not None:
                device = place(self._machine, device)
            return copy(tensor, device=device, **options)

        return {**table, _aten._to_copy.default: to_copy}


def _move(graph: GraphModule, to: Callable[[torch.device], torch.device]) -> None:
    """Replace the devices that ``graph`` and its subgraphs name."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return to(value)
        if isinstance(value, str) and value.partition(":")[0] == "cuda":
            return to(torch.device(value))
        return value

    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args = tree_map(moved, node.args)
                node.kwargs = tree_map(moved, node.kwargs)
            module.recompile()
