"""Saved tensors that wait in host memory."""

from __future__ import annotations

import functools
from typing import Any

from torch.autograd.graph import save_on_cpu

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Make ``save_on_cpu(pin_memory=True)`` copy to pageable memory: the same for the device.

    Source: torch/autograd/graph.py (save_on_cpu), which otherwise fills a CPU tensor of its own.
    """
    initialize: Any = save_on_cpu.__init__

    @functools.wraps(initialize)
    def pageable(hooks: save_on_cpu, pin_memory: bool = False, device_type: str = "cuda") -> None:
        initialize(hooks, False, device_type)

    patches.add(save_on_cpu, "__init__", pageable)
