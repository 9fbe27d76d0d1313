"""Activations whose backward is one kernel on CUDA and a formula of several on ``meta``.

Source: aten/src/ATen/native/native_functions.yaml (dispatch of mish_backward) and
native/Activation.cpp (mish_backward: one output of TensorIterator::binary_op), torch 2.6 to 2.15.
silu_backward has a kernel on ``meta`` as well and needs no entry.
"""

from __future__ import annotations

import torch

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Composite


def mish_backward(gpu: GPU, grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    """``aten::mish_backward``: the product has the shape, type and strides of its output."""
    result = torch.mul(grad_output, self)
    kernel = torch.ops.aten.mish_backward
    gpu.simulation.values.assign(result, kernel, grad_output, self)
    return result


COMPOSITES: dict[str, Composite] = {"aten.mish_backward.default": mish_backward}
"""By overload."""
