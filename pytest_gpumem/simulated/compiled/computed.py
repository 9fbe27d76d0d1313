"""The values of compiled code: its graph runs on the CPU, besides the wrapper that allocates.

Kernels of a wrapper compute nothing. Where every value is computed, their results come from the
graph that Inductor was given, operator by operator, as in eager code; the simulated GPU
sees only the wrapper.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, cast
from unittest import mock

import torch
import torch._inductor.inductor_prims  # makes operators
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.compiled.fakes import name_gpu
from pytest_gpumem.simulated.compiled.settings import launched
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.machine.values.known import Values
from pytest_gpumem.simulated.machine.values.operator import Operator

Wrapper = Callable[[list[Any]], Any]

_aten = torch.ops.aten
_COMPUTED = frozenset({"aten", "prims"})
"""Namespaces of torch's operators, which the CPU can compute."""
_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
_SHARED: dict[Any, Any] = {_aten.view.default: _aten.reshape.default}
"""Replacements because strides differ on the CPU; Inductor treats both as the same, too."""


class GraphValues:
    """The values that ``graph``, not yet changed by Inductor, computes besides its wrapper."""

    def __init__(self, machine: SimulatedMachine, graph: GraphModule) -> None:
        self._machine = machine
        graphs = [each.graph for each in graph.modules() if isinstance(each, GraphModule)]
        lacking = (_uncomputable_part(node) for each in graphs for node in each.nodes)
        self.lacks = _copied_to_host(graph) or next(filter(None, lacking), None)
        """The first operation that cannot be computed; ``None`` where all can be."""
        self._written = _written(graph)
        self._graph = _copied(graph)  # Inductor rewrites its own
        name_gpu(self._graph, lambda value: raw.CPU if isinstance(value, torch.device) else value)

    def with_values(self, wrapper: Wrapper) -> Wrapper:
        """Return a function that runs ``wrapper`` for its allocations and computes its results."""
        machine, values = self._machine, self._machine.values

        def run(inputs: list[Any]) -> Any:
            with machine.execution.lock or nullcontext():
                if self.lacks is not None:
                    values.uncomputed = values.uncomputed or self.lacks
                    return wrapper(inputs)
                capture = values.recording()
                if capture is not None:
                    machine.kernel_wrote()  # into the graph, as if from its results
                    described = capture.described(tuple(self._copies_on_host(inputs)))
                    with _unfollowed(values):
                        results = wrapper(inputs)
                    whole = Operator.by(self._compute, tuple((at, "") for at in self._written))
                    capture.add(whole, described, {}, tuple(results))
                    return results
                # No GPU tensor is referenced here, so the wrapper frees them when a GPU would.
                given = values.shared(self._copies_on_host(inputs))
                if given is None:
                    return wrapper(inputs)
                keys = [storage_key(inputs[at]) for at in self._written]
                with _unfollowed(values):  # it empties its inputs to free them
                    results = wrapper(inputs)
                try:
                    values.mark_known(results, self._compute(*given), given)
                except _UncomputableError:
                    for key in keys:
                        values.forget(key)
                return results

        return run

    def _copies_on_host(self, inputs: list[Any]) -> list[Any]:
        """Return ``inputs``, with copies of those that the wrapper's CPU kernels write to."""
        found = list(inputs)
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            for at in self._written:
                if not raw.is_meta(inputs[at]):
                    found[at] = _aten.clone.default(inputs[at])
        return found

    def _compute(self, *given: Any) -> Any:
        """Run the graph on ``given``, to which it writes; return its results."""
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            computing = _Computing(self._graph, self._machine)
            return computing.run(*given, enable_io_processing=False)


@contextmanager
def _unfollowed(values: Values) -> Iterator[None]:
    """Ignore operators and writes of kernels inside: their results are known from the graph."""
    with values.ignoring(), mock.patch.object(launched, "wrote", None):
        yield


class _UncomputableError(Exception):
    """An operator has no kernel on the CPU: ``Values.uncomputed`` names it."""


class _Computing(Interpreter):
    def __init__(self, graph: GraphModule, machine: SimulatedMachine) -> None:
        super().__init__(graph)
        self._machine = machine
        self._values = machine.values
        self._shapes: Any = None
        """The shapes of the running node's results, where they are known before."""
        self.extra_traceback = False  # an index out of range is the user's

    def run_node(self, n: Node) -> Any:
        self._shapes = n.meta.get(_SHAPES)
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        if isinstance(found, torch.Tensor) and raw.is_meta(found):
            found = self._values.of(found)
            if found is None:
                raise _UncomputableError
        return found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, (OpOverload, HigherOrderOperator)):
            return target(*args, **kwargs)  # arithmetic on sizes
        if isinstance(target, OpOverload) and self._shapes is not None:
            self._values.work.expect(target, args, kwargs, self._shapes)
        if _is_of_torch(target):
            computed = self._values.run(_operator(target), args, kwargs)
        else:
            # A kernel of Triton's that is launched for the CPU would compute nothing.
            launch = RuntimeError("a kernel for a GPU was launched on the CPU")
            with mock.patch.object(self._machine, "kernel_wrote", side_effect=launch):
                computed = self._values.run(_operator(target), args, kwargs)
        if computed is None:
            raise _UncomputableError
        return computed


@cache
def _operator(target: Any) -> Operator:
    drawn = _DRAWN.get(target)
    if drawn is None and isinstance(target, OpOverload) and _is_of_torch(target):
        return Operator.of(_SHARED.get(target, target))
    return Operator.by(target if drawn is None else drawn)


def _random(size: Any, seed: torch.Tensor, mode: str, **_: Any) -> torch.Tensor:
    """Draw for ``inductor_random`` by its seed, so that backward draws the same again."""
    draw = getattr(_aten, mode).generator
    drawn: torch.Tensor = draw(size, generator=_seeded(seed), dtype=torch.float32, device=raw.CPU)
    return drawn


def _random_integers(low: int, high: int, size: Any, seed: torch.Tensor) -> torch.Tensor:
    drawn: torch.Tensor = _aten.randint.low_generator(
        low, high, size, generator=_seeded(seed), dtype=torch.int64, device=raw.CPU
    )
    return drawn


def _seeded(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(raw.CPU).manual_seed(int(seed))


_prims = torch.ops.prims
_DRAWN: dict[Any, Callable[..., torch.Tensor]] = {
    _prims.inductor_random.default: _random,
    _prims.inductor_randint.default: _random_integers,
}
"""Operators whose seed is an argument; torch's versions, for tracing, ignore it.

Source: torch/_inductor/inductor_prims.py and fx_passes/replace_random.py, torch 2.11 and 2.13.
"""
_FOLLOWED = frozenset({"flex_attention", "flex_attention_backward"})
"""Higher-order operators whose implementation on the CPU is made of operators."""

_LAID_OUT = re.compile("_stride$")
"""Arguments that describe the layout of a view in a copy."""
_FUNCTIONALIZED = frozenset({"auto_functionalized", "auto_functionalized_v2"})
"""Higher-order operators that call a mutating operator on copies of its arguments."""

_OF_STORAGES = re.compile("as_strided|eager_offset")
"""Operators that ask for the strides, or for the random numbers, of a GPU."""


def _uncomputable_part(node: Node) -> str | None:
    """Return the part of ``node`` that cannot be computed besides a wrapper, or ``None``."""
    target: Any = node.target
    if node.meta.get("unbacked_bindings"):
        return f"{target}, which makes sizes of values,"
    if isinstance(target, HigherOrderOperator):
        if target.name() in _FUNCTIONALIZED and not any(map(_LAID_OUT.search, node.kwargs)):
            return _lacking_operator(cast(OpOverload, node.args[0]))
        return None if target.name() in _FOLLOWED else str(target)
    return _lacking_operator(target) if isinstance(target, OpOverload) else None


def _lacking_operator(operator: OpOverload) -> str | None:
    """Return ``operator`` if the CPU cannot compute it.

    A custom one runs on the CPU if it is registered for all devices: ``torch.library.custom_op``
    does so where it gets no ``device_types``. Other kernels for all devices do not count:
    collectives have one, too.
    """
    name = operator.name()
    anywhere = operator._schema.name in OPDEFS and _has_kernel(name, "CompositeExplicitAutograd")
    known = _is_of_torch(operator) or anywhere or _has_kernel(name, "CPU")
    known = known and not _OF_STORAGES.search(operator._schema.name)
    known = known and not Operator.of(operator).moves_views
    return None if known else str(operator)


def _is_of_torch(target: Any) -> bool:
    return not isinstance(target, OpOverload) or target.namespace in _COMPUTED


def _copied_to_host(graph: GraphModule) -> str | None:
    """Return the first copy from a GPU to the CPU in ``graph``: kernels there need its values."""
    of_gpu: set[Node] = set()
    for node in graph.graph.nodes:
        found = list(raw.tensors_in(node.meta.get("val")))
        if any(each.is_cuda for each in found):
            of_gpu.add(node)
        elif found and not of_gpu.isdisjoint(node.all_input_nodes):
            return f"{node.target}, which copies to the CPU,"
    return None


def _written(graph: GraphModule) -> list[int]:
    """Return the positions of the inputs that ``graph`` writes to."""
    written = set()
    for node in graph.graph.nodes:
        if isinstance(node.target, OpOverload):
            places = [at for at, _ in Operator.of(node.target).written if at < len(node.args)]
            leaves = tree_leaves([node.args[at] for at in places])
            written |= {each for each in leaves if isinstance(each, Node)}
    inputs = graph.graph.find_nodes(op="placeholder")
    return [at for at, each in enumerate(inputs) if each in written]


_SHAPES = "shapes"


def _copied(graph: GraphModule) -> GraphModule:
    copied = GraphModule(graph, copy.deepcopy(graph.graph))
    for node in copied.graph.nodes:
        value = node.meta.get("val")
        sizes = [size for each in raw.tensors_in(value) for size in each.shape]
        node.meta = {}
        if all(isinstance(size, int) for size in sizes):
            node.meta[_SHAPES] = tree_map_only(torch.Tensor, lambda each: each.shape, value)
    for name, inner in list(copied.named_children()):
        if isinstance(inner, GraphModule):
            setattr(copied, name, _copied(inner))
    return copied
