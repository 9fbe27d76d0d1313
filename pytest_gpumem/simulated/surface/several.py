"""Several GPUs: code that torch has in C++, out of sight, and operations without support here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import comm

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.placement import return_gradient
from pytest_gpumem.values.errors import UnsupportedOperatorError

_BEGIN_WITH_A_FACTORY = (
    (torch._C._nn, "one_hot"),
    (nn.functional, "one_hot"),
    (torch._C._nn, "pad_sequence"),
)
"""Composite functions whose first step gets only the options of their arguments."""

_COLLECTIVES = ("broadcast", "broadcast_coalesced", "reduce_add", "scatter", "gather")


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace functions that would take all GPUs for one, and refuse those that need real ones."""
    _add_refusals(machine, patches)
    if machine.placement is None:
        return
    patches.add(torch.Tensor, "copy_", _copying(machine))
    for owner, name in _BEGIN_WITH_A_FACTORY:
        patches.add(owner, name, _followed(machine, getattr(owner, name)))


def _copying(machine: SimulatedMachine) -> Callable[..., torch.Tensor]:
    copy: Callable[..., torch.Tensor] = raw.base("copy_")
    of = machine.storages.of

    @functools.wraps(torch.Tensor.copy_)
    def copy_(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied = copy(tensor, *args, **kwargs)
        source = next((one for one in (*args, *kwargs.values()) if _has_gradient(one)), None)
        if source is not None:
            here, there = of(tensor), of(source)
            if here and there and here.device is not there.device:
                return_gradient(copied, there.device, position=1)
        return copied

    return copy_


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def brought(machine: SimulatedMachine, tensor: torch.Tensor, value: Any) -> Any:
    """Return the value to write into ``tensor`` for ``value``: a copy if it is on another GPU.

    The copy that ``tensor[index] = value`` makes in C++ would not bring the gradient back.
    """
    if isinstance(value, torch.Tensor) and value.requires_grad:
        here, there = machine.storages.of(tensor), machine.storages.of(value)
        if here and there and here.device is not there.device:
            return value.to(tensor.device)
    return value


def _followed(machine: SimulatedMachine, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if machine.placement is not None:
            machine.placement.follow(args, kwargs)
        return function(*args, **kwargs)

    return call


def _add_refusals(machine: SimulatedMachine, patches: Patches) -> None:
    def several(this: Any, module: nn.Module, device_ids: Any = None, *_: Any, **__: Any) -> bool:
        return len(machine.gpus if device_ids is None else device_ids) > 1

    begin = _refusing("nn.DataParallel over several GPUs", nn.DataParallel.__init__, several)
    patches.add(nn.DataParallel, "__init__", begin)
    for name in _COLLECTIVES:
        called = f"torch.nn.parallel.comm.{name}"
        patches.add(comm, name, _refusing(called, getattr(comm, name), _name_gpu))


def _refusing(
    name: str, function: Callable[..., Any], refused: Callable[..., bool]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if refused(*args, **kwargs):
            raise UnsupportedOperatorError(
                f"{name} at {user_line()} copies between GPUs in code of its own, which a "
                "simulated GPU does not have: test the model on one GPU, or place its parts with "
                '.to("cuda:1")'
            )
        return function(*args, **kwargs)

    return call


def _name_gpu(*args: Any, **kwargs: Any) -> bool:
    return _names_gpu((args, kwargs))


def _names_gpu(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_names_gpu, value))
    return isinstance(value, (str, torch.device)) and torch.device(value).type == "cuda"
