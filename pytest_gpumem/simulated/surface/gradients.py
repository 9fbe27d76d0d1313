"""``Tensor.grad``: torch compares devices in C++, where a simulated GPU is ``meta``."""

from __future__ import annotations

from typing import Any

import torch
import torch.overrides

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_grad: Any = vars(torch._C.TensorBase)["grad"]


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Check where an assigned gradient is, in torch's words.

    Source: torch/csrc/autograd/python_variable.cpp (THPVariable_set_grad), torch 2.6 to 2.15.
    """

    def assign(tensor: torch.Tensor, gradient: Any) -> None:
        if gradient is not None and isinstance(gradient, torch.Tensor):
            _check_devices(tensor, gradient)
        _grad.__set__(tensor, gradient)

    replaced = property(_grad.__get__, assign, _grad.__delete__)
    # Subclasses see by it that its result is not of their class.
    nowrap = frozenset({*torch.overrides.get_default_nowrap_functions(), replaced.__get__})
    patches.add(torch._tensor, "get_default_nowrap_functions", lambda: nowrap)
    patches.add(torch.Tensor, "grad", replaced)


def _check_devices(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    here, there = tensor.device, gradient.device
    if here == there or tensor.dtype is not gradient.dtype:
        return
    if here.type != there.type:
        what = f"with device type '{there.type}' to a tensor with device type '{here.type}'"
    else:
        what = (
            f"located on device with index '{there.index}' to a tensor located on device with "
            f"index '{here.index}'"
        )
    raise RuntimeError(
        f"attempting to assign a gradient {what}. Please ensure that the gradient and the tensor "
        "are on the same device"
    )
