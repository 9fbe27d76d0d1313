"""``pin_memory`` and ``is_pinned``."""

from __future__ import annotations

from typing import Any, cast

import torch

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.execution import kinds
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.surface.wrappers import is_wrapper


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace ``pin_memory`` and ``is_pinned``."""
    aten = torch.ops.aten

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        if is_wrapper(tensor):
            return bool(aten.is_pinned.default(tensor))
        return kinds.is_pinned(machine, tensor)

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if not is_wrapper(tensor):
            return kinds.pinned(machine, tensor)
        if is_pinned(tensor):
            return tensor
        return cast(torch.Tensor, aten._pin_memory.default(tensor))

    patches.add(torch.Tensor, "is_pinned", is_pinned)
    patches.add(torch.Tensor, "pin_memory", pin_memory)
    patches.add(
        torch.UntypedStorage,
        "is_pinned",
        lambda storage, device=None: machine.pinned.has(storage),
    )
