"""``pin_memory`` and ``is_pinned``."""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def plan(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace ``pin_memory`` and ``is_pinned``."""
    pinned = machine.pinned

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        if machine.storages.of(tensor) is not None:
            return False
        try:
            return pinned.has(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):  # sparse tensors, wrapper subclasses
            return False

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if machine.storages.of(tensor) is not None:
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        if is_pinned(tensor):
            return tensor
        if tensor.layout is not torch.strided or machine.storages.is_on_host(tensor):
            return pinned.add(tensor.clone())
        return pinned.copied(tensor)

    patches.plan(torch.Tensor, "is_pinned", is_pinned)
    patches.plan(torch.Tensor, "pin_memory", pin_memory)
    patches.plan(
        torch.UntypedStorage, "is_pinned", lambda storage, device=None: pinned.has(storage)
    )
