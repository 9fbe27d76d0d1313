"""Dropout: on CUDA one fused kernel with a mask of one byte per element.

Source: aten/src/ATen/native/Dropout.cpp (is_fused_kernel_acceptable) and native/cuda/Dropout.cu
(native_dropout_cuda, dropout_cuda), of torch 2.6 to 2.15.
"""

from __future__ import annotations

import torch

from pytest_gpumem.simulated.operators.rules import Composite, Rule


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``aten::dropout`` as CUDA takes it apart."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    return torch.ops.aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]  # an operator


COMPOSITES: dict[str, Composite] = {"aten.dropout.default": dropout}


def _outputs(
    p: float, train: bool | None, result: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """dropout_cuda makes the mask first; where everything is dropped, zeros come before theirs."""
    output, mask = result
    return (output, mask) if p == 1 or train is False else (mask, output)


RULES = {"aten::native_dropout": Rule(placed=_outputs)}
