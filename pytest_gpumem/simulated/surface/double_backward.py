"""Backward passes: the nodes that one makes are numbered as a GPU's own thread numbers them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.autograd.graph

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine, leaves_of, renumber

_next = torch._C._autograd._get_sequence_nr
_graph_task = torch._C._current_graph_task_id


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Count the nodes that each outermost pass has made.

    With streams of the user's own the numbers stay: they show on which stream a node was made.
    """
    engine = torch.autograd.graph._engine_run_backward

    @functools.wraps(engine)
    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _graph_task() != -1:
            return engine(t_outputs, *args, **kwargs)
        began, results = _next(), None
        try:
            results = engine(t_outputs, *args, **kwargs)
            return results
        finally:
            if _next() != began and any(getattr(each, "is_cuda", False) for each in t_outputs):
                number = machine.numbering.ended(began)
                if _creates_graph(args) and not machine.streams.used:
                    renumber(_made(t_outputs, args, results), began, number)

    for owner in (torch.autograd, torch.autograd.graph):
        patches.add(owner, "_engine_run_backward", run)


def _creates_graph(args: tuple[Any, ...]) -> bool:
    """``(grad_tensors, retain_graph, create_graph, inputs, ...)`` of torch/autograd/__init__.py."""
    return len(args) > 2 and bool(args[2])


def _made(outputs: Any, args: tuple[Any, ...], results: Any) -> list[Any]:
    """Return the gradients of a pass: its results, or the leaves' present gradients."""
    found = [each for each in results or () if isinstance(each, torch.Tensor)]
    if found:
        return found
    leaves = args[3] if len(args) > 3 and args[3] else leaves_of(outputs)
    return [leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor)]
