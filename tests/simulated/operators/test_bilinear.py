"""Products of three tensors: a batched product of matrices for each output feature."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pytest_gpumem import simulate


def test_each_output_feature_is_two_products(on: Any) -> None:
    gpu = on()
    layer = nn.Bilinear(2, 3, 4, bias=False).cuda()
    x, y = torch.randn(8, 2, device="cuda"), torch.randn(8, 3, device="cuda")
    layer(x, y)  # takes cuBLAS's workspace
    # Of 8 rows: 3 sums over the first two, then one with the others, which is added.
    assert gpu.of(lambda: layer(x, y)) == [8 * 4 * 4, *[8 * 3 * 4, 8 * 4, -8 * 3 * 4, -8 * 4] * 4]


def test_bilinear_has_the_values_of_the_cpu() -> None:
    with simulate("A100-40GB", real_values=True):
        layer, x, y = nn.Bilinear(2, 3, 4), torch.randn(8, 2), torch.randn(8, 3)
        expected = layer(x, y)
        torch.testing.assert_close(layer.cuda()(x.cuda(), y.cuda()).cpu(), expected)
