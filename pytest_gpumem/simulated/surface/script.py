"""TorchScript: its interpreter runs operator by operator, on modules that live in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.jit._script import RecursiveScriptModule

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Move and load scripted modules in Python, where C++ would need a device."""
    patches.add(RecursiveScriptModule, "_apply", _apply)
    patches.add(torch.jit, "load", _load(torch.jit.load))


def _apply(
    module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """``Module._apply`` of a scripted module: C++ holds its tensors, so they are replaced there."""
    if recurse:
        for child in module.children():
            child._apply(function)
    with torch.no_grad():
        tensors: tuple[Any, ...] = (module._parameters, module._buffers)
        for held in tensors:
            for name, tensor in list(held.items()):
                if tensor is not None:
                    moved = function(tensor)
                    held[name] = moved.requires_grad_() if tensor.requires_grad else moved
    return module


def _load(load: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        if map_location is None or torch.device(map_location).type != "cuda":
            return load(file, map_location, *args, **options)
        return load(file, "cpu", *args, **options).to(map_location)

    return call
