"""Activations: one kernel and one output each way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

BYTES = 4 * 1000


@pytest.mark.parametrize("kind", [nn.SiLU, nn.Mish, nn.GELU, nn.Softplus, nn.SELU, nn.ELU])
def test_backward_allocates_its_output_alone(on: Any, kind: type[nn.Module]) -> None:
    gpu = on()
    x = torch.ones(1000, device="cuda", requires_grad=True)
    y = kind()(x)
    gradient = torch.ones_like(y)
    assert gpu.of(lambda: torch.autograd.grad(y, x, gradient)) == [BYTES]


def test_the_gradient_of_a_learnt_slope_is_summed_from_full_size(on: Any) -> None:
    gpu = on()
    layer = nn.PReLU().cuda()
    x = torch.ones(1000, device="cuda", requires_grad=True)
    y = layer(x)
    gradient = torch.ones_like(y)
    assert gpu.of(lambda: torch.autograd.grad(y, [x, layer.weight], gradient))[:3] == [
        BYTES,
        BYTES,
        4,
    ]


@pytest.mark.parametrize("kind", [nn.SiLU, nn.Mish])
def test_second_derivatives_run_composite_formulas(on: Any, kind: type[nn.Module]) -> None:
    on()
    x = torch.ones(1000, device="cuda", requires_grad=True)
    (first,) = torch.autograd.grad(kind()(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.shape == x.shape
