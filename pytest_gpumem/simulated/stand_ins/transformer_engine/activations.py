"""Activations of an MLP: what their kernels allocate, in the dtype of their input or in fp8.

Source: transformer_engine/pytorch/csrc/extensions/activation.cpp (``activation_forward``,
``activation_backward``), bias.cpp (``dact_dbias``) and transpose.cpp (``fp8_transpose``) of 2.8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.registering import compiled
from pytest_gpumem.simulated.stand_ins.transformer_engine.fp8 import (
    Quantized,
    allocate,
    bias_sums,
    quantized,
)
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import launched

GATED = ("geglu", "qgeglu", "reglu", "sreglu", "swiglu")
"""Half of their input is a gate."""
PLAIN = ("gelu", "qgelu", "relu", "silu", "srelu")
"""Their gradient, its transpose and that of the bias are made by one kernel in fp8."""


def _activate(x: Tensor, columns: int) -> Tensor:
    launched()
    given = x.contiguous()
    return torch.empty((*given.shape[:-1], columns), dtype=given.dtype, device=given.device)


def _activate_to_fp8(x: Tensor, columns: int) -> tuple[Tensor, ...]:
    launched()
    given = x.contiguous()
    return allocate(torch.Size((*given.shape[:-1], columns)), given.device, transposed=False)


def _differentiate(grad: Tensor, x: Tensor) -> Tensor:
    launched()
    given = grad.contiguous(), x.contiguous()
    return torch.empty(given[1].shape, dtype=given[1].dtype, device=given[1].device)


def _differentiate_to_fp8(grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    launched()
    given = grad.contiguous(), x.contiguous()
    made = allocate(given[1].shape, given[1].device, transposed=True)
    bias = torch.empty(given[1].shape[-1], dtype=grad.dtype, device=grad.device)
    bias_sums(given[1])
    return bias, *made


def _transpose(data: Tensor) -> Tensor:
    launched()
    shape = data.shape[-1], *data.shape[:-1]
    return torch.empty(shape, dtype=torch.uint8, device=data.device)


_activated = compiled(_activate)
_activated_to_fp8 = compiled(_activate_to_fp8)
_differentiated = compiled(_differentiate)
_differentiated_to_fp8 = compiled(_differentiate_to_fp8)
_transposed = compiled(_transpose)


def _columns(activation: str, x: Tensor) -> int:
    return x.shape[-1] // 2 if activation in GATED else x.shape[-1]


def activate(activation: str, x: Tensor) -> Tensor:
    """tex.gelu() and its siblings."""
    made: Tensor = _activated(x, _columns(activation, x))
    return made


def activate_to_fp8(activation: str, x: Tensor) -> Quantized:
    """tex.gelu() and its siblings, cast on the way, without a transpose."""
    return quantized(_activated_to_fp8(x, _columns(activation, x)))


def differentiate(grad: Tensor, x: Tensor) -> Tensor:
    """tex.dgelu() and its siblings."""
    made: Tensor = _differentiated(grad, x)
    return made


def differentiate_to_fp8(grad: Tensor, x: Tensor) -> tuple[Tensor, Quantized]:
    """tex.dbias_dgelu() and its siblings: the gradient of the bias, and that of ``x`` in fp8."""
    bias, *made = _differentiated_to_fp8(grad, x)
    return bias, quantized(tuple(made))


def transpose(tensor: Quantized) -> None:
    """update_usage(columnwise_usage=True): make the transpose that was not made before."""
    if tensor.transposed is None and tensor.data is not None:
        tensor.transposed = _transposed(tensor.data)
