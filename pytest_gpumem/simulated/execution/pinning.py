"""``is_pinned`` and ``pin_memory``, of tensors that hold memory and of those that hold others.

Source: aten/src/ATen/native/Memory.cpp (is_pinned, pin_memory): a subclass that handles operators
itself gets ``aten::is_pinned`` and ``aten::_pin_memory``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_gpumem.simulated.execution.runner import Runner
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def is_pinning(func: Any) -> bool:
    """Return whether ``func`` is about pinned memory."""
    return func._schema.name in _ANSWERS


def pinning(runner: Runner, func: Any) -> Handler:
    """Return a handler that answers ``func`` as the methods of a tensor do."""
    answer = _ANSWERS[func._schema.name]
    return lambda args, kwargs: answer(runner.machine, args[0])


def is_pinned(machine: SimulatedMachine, tensor: torch.Tensor) -> bool:
    """Return whether a tensor of the host has memory that is pinned."""
    if machine.storages.of(tensor) is not None:
        return False
    try:
        return machine.pinned.has(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return False


def pinned(machine: SimulatedMachine, tensor: torch.Tensor) -> torch.Tensor:
    """Return a pinned copy of ``tensor``, or itself where it is pinned.

    Raises ``RuntimeError`` in torch's words for a tensor on a GPU.
    """
    if machine.storages.of(tensor) is not None:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    if is_pinned(machine, tensor):
        return tensor
    if tensor.layout is not torch.strided or machine.storages.is_on_host(tensor):
        return machine.pinned.add(tensor.clone())
    return machine.pinned.copied(tensor)


_ANSWERS: dict[str, Callable[[SimulatedMachine, torch.Tensor], Any]] = {
    "aten::is_pinned": is_pinned,
    "aten::_pin_memory": pinned,
}
"""By operator."""
