"""Saved tensors that wait in host memory."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.autograd.graph import save_on_cpu

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Make ``save_on_cpu(pin_memory=True)`` copy to pageable memory: the same for the device.

    Source: torch/autograd/graph.py (save_on_cpu), which otherwise fills a CPU tensor of its own.
    That tensor is contiguous, so the device first copies one that is not
    (aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries).
    """
    initialize: Any = save_on_cpu.__init__

    @functools.wraps(initialize)
    def pageable(hooks: save_on_cpu, pin_memory: bool = False, device_type: str = "cuda") -> None:
        initialize(hooks, False, device_type)
        if pin_memory:
            packed: Any = hooks.pack_hook

            def pack(tensor: Tensor) -> Any:
                return packed(tensor.contiguous())

            hooks.pack_hook = pack

    patches.add(save_on_cpu, "__init__", pageable)
