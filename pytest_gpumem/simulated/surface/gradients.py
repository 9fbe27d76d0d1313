"""Gradients: their device, tensors saved for them, passes that torch traces, and optimizers.

torch compares the device of ``Tensor.grad`` in C++, where a simulated GPU is ``meta``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.autograd.graph
import torch.overrides
from torch.autograd.graph import save_on_cpu
from torch.utils import _python_dispatch

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine, leaves_of, renumber

_grad: Any = vars(torch._C.TensorBase)["grad"]


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Check the device of an assigned gradient, with torch's error.

    Source: torch/csrc/autograd/python_variable.cpp (THPVariable_set_grad), torch 2.6 to 2.15.
    """

    def assign(tensor: torch.Tensor, gradient: Any) -> None:
        if isinstance(gradient, torch.Tensor) and tensor.dtype is gradient.dtype:
            _check_devices(tensor.device, gradient.device)
        _grad.__set__(tensor, gradient)

    replaced = property(_grad.__get__, assign, _grad.__delete__)
    # By it subclasses see that its result is not of their class.
    nowrap = frozenset({*torch.overrides.get_default_nowrap_functions(), replaced.__get__})
    patches.add(torch._tensor, "get_default_nowrap_functions", lambda: nowrap)
    patches.add(torch.Tensor, "grad", replaced)
    patches.wrap(save_on_cpu, "__init__", _save_pageable)
    _add_double_backward(machine, patches)
    _add_control_flow(machine, patches)
    _add_grouping(patches)


def _check_devices(own: torch.device, assigned: torch.device) -> None:
    if own == assigned:
        return
    if own.type != assigned.type:
        what = f"with device type '{assigned.type}' to a tensor with device type '{own.type}'"
    else:
        what = (
            f"located on device with index '{assigned.index}' to a tensor located on device with "
            f"index '{own.index}'"
        )
    raise RuntimeError(
        f"attempting to assign a gradient {what}. Please ensure that the gradient and the tensor "
        "are on the same device"
    )


def _save_pageable(
    initialize: Any, hooks: save_on_cpu, pin_memory: bool = False, *args: Any, **options: Any
) -> None:
    """Make ``save_on_cpu(pin_memory=True)`` copy to pageable memory: the device allocates the same.

    Source: torch/autograd/graph.py (save_on_cpu), which otherwise fills a CPU tensor of its own,
    and does not wait for the copies back. That tensor is contiguous, so the device first copies one
    that is not (aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries).
    """
    initialize(hooks, False, *args, **options)
    if pin_memory:
        packed: Any = hooks.pack_hook
        hooks.pack_hook = lambda tensor: packed(tensor.contiguous())
        hooks.unpack_hook = lambda saved: saved[1].to(saved[0], non_blocking=True)


_next = torch._C._autograd._get_sequence_nr
_graph_task = torch._C._current_graph_task_id


def _add_double_backward(machine: SimulatedMachine, patches: Patches) -> None:
    """Count the nodes that each outermost backward pass has made.

    With streams of the user's own the numbers stay: they show on which stream a node was made.
    """

    def run(engine: Callable[..., Any], t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with machine.streams.passing(t_outputs, args[0], machine.storages.of):
            return run_outermost(engine, t_outputs, *args, **kwargs)

    def run_outermost(engine: Callable[..., Any], t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _graph_task() != -1:
            return engine(t_outputs, *args, **kwargs)
        began, results = _next(), None
        try:
            results = engine(t_outputs, *args, **kwargs)
            return results
        finally:
            if _next() != began and any(getattr(each, "is_cuda", False) for each in t_outputs):
                number = machine.numbering.ended(began)
                # (grad_tensors, retain_graph, create_graph, ...), torch/autograd/__init__.py
                if len(args) > 2 and args[2] and not machine.streams.used:
                    renumber(_gradients_of(t_outputs, args, results), began, number)

    for owner in (torch.autograd, torch.autograd.graph):
        patches.wrap(owner, "_engine_run_backward", run)


def _gradients_of(outputs: Any, args: tuple[Any, ...], results: Any) -> list[Any]:
    """Return the gradients of a pass: its results, else ``grad`` of its inputs or leaves."""
    found = [each for each in results or () if isinstance(each, torch.Tensor)]
    if found:
        return found
    leaves = args[3] if len(args) > 3 and args[3] else leaves_of(outputs)
    return [leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _add_control_flow(machine: SimulatedMachine, patches: Patches) -> None:
    """Show the machine the operators of gradients of eager control flow, which torch traces.

    torch traces by running the code on the device, without any mode, and these operators take
    memory like all others. Source: torch/_higher_order_ops/utils.py (``materialize_as_graph``),
    torch 2.11 to 2.15.
    """

    @contextmanager
    def all_others(disabled: AbstractContextManager[Any]) -> Iterator[Any]:
        mode: Any = machine.execution
        with disabled as modes, mode:
            yield modes

    def disable(disable: Callable[[], Any]) -> Any:
        traces = sys._getframe(2).f_code.co_name == "_materialize_as_graph_inner"
        return all_others(disable()) if traces else disable()

    patches.wrap(_python_dispatch, "_disable_current_modes", disable)


_Lists = list[list[torch.Tensor | None]]
_Key = tuple[torch.device, torch.dtype]
_Group = tuple[list[list[torch.Tensor | None]], list[int]]


def _add_grouping(patches: Patches) -> None:
    """Group the tensors of ``torch.optim`` and ``clip_grad_norm_`` by the device they report."""

    def group_tensors(
        group: Callable[..., Any], lists: _Lists, with_indices: bool = False
    ) -> dict[_Key, _Group]:
        groups: dict[_Key, _Group] = group(lists, True)
        result: dict[_Key, _Group] = {}
        for (device, dtype), (members, indices) in groups.items():
            if device.type != "meta":
                result[device, dtype] = members, indices if with_indices else []
                continue
            for seen, at in _by_device(members[0]).items():
                split = [[tensors[i] for i in at] if tensors else [] for tensors in members]
                result[seen, dtype] = split, [indices[i] for i in at] if with_indices else []
        return result

    patches.wrap(torch._C, "_group_tensors_by_device_and_dtype", group_tensors)


def _by_device(tensors: Sequence[torch.Tensor | None]) -> dict[torch.device, list[int]]:
    """Group positions of ``tensors`` by device, the last one met first, as C++'s hash map does."""
    devices: dict[torch.device, list[int]] = {}
    for position, tensor in enumerate(tensors):
        assert tensor is not None  # torch checks the first list
        devices.setdefault(tensor.device, []).append(position)
    return dict(reversed(devices.items()))
