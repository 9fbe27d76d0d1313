"""Assertions that CUDA checks on the device.

Source: aten/src/ATen/native/cuda/TensorCompare.cu (_assert_async_cuda), torch 2.6 to 2.15. On a GPU
a failed one stops the process's CUDA at its next call; here it stops the call itself.
"""

from __future__ import annotations

import torch

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Rule


def _check(gpu: GPU, self: torch.Tensor) -> None:
    if self.numel() != 1:
        many = "more than one value" if self.numel() else "no values"
        raise RuntimeError(f"Boolean value of Tensor with {many} is ambiguous")
    known = gpu.simulation.values.known(self)
    if known is not None and not known.item():
        error: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
        raise error("CUDA error: device-side assert triggered")


RULES = {"aten::_assert_async": Rule(before=_check)}
"""By operator name."""
