"""A graph of Dynamo's, led through AOTAutograd and Inductor.

C++ knows the fake tensors of a GPU as ``meta`` (see ``fakes``): what AOTAutograd takes from C++
says so, and says ``cuda`` again before Inductor gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from pytest_gpumem.simulated.compiled.fakes import indexed, place
from pytest_gpumem.simulated.compiled.refusals import not_followed, note_at_line
from pytest_gpumem.simulated.compiled.tracing import TUNING, Tracing
from pytest_gpumem.simulated.compiled.triton import standing_in
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

Compiled = Callable[..., Any]


class Inductor:
    """The backend of one ``torch.compile``; ``settings`` are Inductor's, by name.

    What it cannot follow runs eagerly, with a note, or raises
    :class:`~pytest_gpumem.simulated.compiled.refusals.CompiledCodeError` where that ``refuses``.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        tracing: Tracing,
        settings: Mapping[str, Any],
        *,
        refuses: bool,
    ) -> None:
        self._machine = machine
        self._tracing = tracing
        self._settings = {name: value for name, value in settings.items() if name not in TUNING}
        self._refuses = refuses
        self._tunes = any(settings.get(name) for name in TUNING)

    def __eq__(self, other: object) -> bool:
        """Whether Dynamo may take for this one what it has compiled for ``other``."""
        if not isinstance(other, Inductor):
            return NotImplemented
        return self._machine is other._machine and self._settings == other._settings

    def __hash__(self) -> int:
        return hash(self._machine)

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], **_: Any) -> Compiled:
        """Return what runs in the place of ``graph``."""
        if not _is_of_gpu(graph, inputs):
            return graph.forward  # the CPU computes what it is told
        _name_gpu(graph, lambda value: indexed(self._machine, value))
        if self._tunes:
            note_at_line(
                self._machine,
                "chooses kernels by their speed: it got its first choices, without what measuring "
                "them allocates",
            )
        try:
            with standing_in():
                compiled: Any = compile_fx(
                    graph,
                    inputs,
                    inner_compile=self._inner,
                    config_patches=self._settings,
                )
        except (RestartAnalysis, SkipFrame):
            raise  # to Dynamo, which traces again with what it has learned
        except Exception as error:
            not_followed(self._machine, error, refuses=self._refuses)
            if not InstructionTranslator.current_tx().one_graph:
                raise SkipFrame("runs as it is written") from error
            return graph.forward  # nobody else may run a graph that has to be whole
        return cast(Compiled, compiled)

    def _inner(self, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        _name_gpu(graph, self._as_python_says)
        # The backward of a graph may be compiled when it is first needed.
        with self._tracing.entered(), standing_in():
            return compile_fx_inner(graph, inputs, **options)

    def _as_python_says(self, value: Any) -> Any:
        return place(self._machine, value) if isinstance(value, torch.device) else value


def _is_of_gpu(graph: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether there is a tensor on a GPU in ``graph``."""
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    return any(
        isinstance(value, torch.Tensor) and value.is_cuda
        for value in tree_leaves([*inputs, *values])
    )


def _name_gpu(graph: GraphModule, named: Callable[[Any], Any]) -> None:
    """Replace the devices that operators of ``graph`` and its subgraphs get."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_method":
                    node.args = tree_map(named, node.args)
                node.args = tuple(
                    named(value) if isinstance(value, torch.device) else value
                    for value in node.args
                )
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": named(node.kwargs["device"])}
            module.recompile()
