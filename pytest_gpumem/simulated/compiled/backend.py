"""Backends of ``torch.compile`` for a simulated GPU: Inductor, and those written in Python.

A backend gets Dynamo's graph and its result runs, as on a GPU: Inductor's wrapper, or the
graphs that AOTAutograd has cut, operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch._dynamo.exc import RestartAnalysis, SkipFrame, exceptions_allowed_to_be_fallback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from pytest_gpumem.simulated.compiled.fakes import are_of_gpu, indexed, name_gpu
from pytest_gpumem.simulated.compiled.settings import not_followed
from pytest_gpumem.simulated.compiled.tracing import Tracing
from pytest_gpumem.simulated.compiled.wrapper import standing_in
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

Compiled = Callable[..., Any]

_DYNAMOS_OWN = (RestartAnalysis, SkipFrame, *exceptions_allowed_to_be_fallback)
"""Exceptions that Dynamo handles by a graph break, or by starting again."""


class Backend:
    """The backend of one ``torch.compile``: ``given``, for a graph that is on a simulated GPU.

    Code that it cannot compile runs eagerly, with a note, or raises
    :class:`~pytest_gpumem.simulated.compiled.settings.CompiledCodeError` where that ``refuses``.
    """

    def __init__(
        self, machine: SimulatedMachine, tracing: Tracing, given: Any, *, refuses: bool
    ) -> None:
        self._machine = machine
        self._tracing = tracing
        self._given = given
        self._settings: dict[str, Any] | None = getattr(given, "config", None)
        """Inductor's settings, by name; ``None`` for another backend."""
        self._refuses = refuses

    def __eq__(self, other: object) -> bool:
        """Return whether Dynamo may use code for this backend that it compiled for ``other``."""
        if not isinstance(other, Backend):
            return NotImplemented
        return self._machine is other._machine and bool(self._given == other._given)

    def __hash__(self) -> int:
        return hash(self._machine)

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Compiled:
        """Return the function that runs in the place of ``graph``."""
        if self._settings is not None:
            nodes = graph.graph.nodes
            if not are_of_gpu([*inputs, *(node.meta.get("example_value") for node in nodes)]):
                return graph.forward  # the CPU runs it as it is
            self._tracing.note_tuning(self._settings)
        elif not _is_of_torch(self._given):
            # A backend may inspect its inputs while torch compiles: they are fakes on a GPU.
            placed = graph.graph.find_nodes(op="placeholder")
            fakes = [node.meta.get("example_value") for node in placed]
            inputs = [
                fake if isinstance(fake, FakeTensor) else value
                for value, fake in zip(inputs, fakes, strict=True)
            ]
        name_gpu(graph, lambda value: indexed(self._machine, value))
        try:
            with standing_in():
                return cast(Compiled, self._given(graph, inputs, **options))
        except _DYNAMOS_OWN:
            raise
        except Exception as error:
            not_followed(self._machine, error, refuses=self._refuses)
            if not InstructionTranslator.current_tx().one_graph:
                raise SkipFrame("runs as it is written") from error
            return graph.forward  # a graph of fullgraph=True has to run as a whole


def _is_of_torch(backend: Any) -> bool:
    called = getattr(backend, "compiler_fn", backend)
    module: str = getattr(called, "__module__", None) or type(called).__module__
    return module.partition(".")[0] == "torch"
