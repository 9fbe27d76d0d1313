"""cuDNN's convolutions under their own names, computed on the CPU.

Source: aten/src/ATen/native/cudnn/ConvShared.cpp, torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _plain(
    input: Tensor,
    weight: Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_: bool,
) -> Tensor:
    zeros = [0] * len(stride)
    return torch.convolution(input, weight, None, stride, padding, dilation, False, zeros, groups)


def _transposed(
    input: Tensor,
    weight: Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_: bool,
) -> Tensor:
    return torch.convolution(
        input, weight, None, stride, padding, dilation, True, output_padding, groups
    )


def _relu(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], *rest: Any
) -> Tensor:
    padding, dilation, groups = rest
    zeros = [0] * len(stride)
    return torch.convolution(
        input, weight, bias, stride, padding, dilation, False, zeros, groups
    ).relu()


def _add_relu(
    input: Tensor,
    weight: Tensor,
    z: Tensor,
    alpha: float | None,
    bias: Tensor | None,
    stride: list[int],
    *rest: Any,
) -> Tensor:
    padding, dilation, groups = rest
    zeros = [0] * len(stride)
    plain = torch.convolution(input, weight, bias, stride, padding, dilation, False, zeros, groups)
    return (plain + z * (1.0 if alpha is None else alpha)).relu()


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::cudnn_convolution": _plain,
    "aten::cudnn_convolution_transpose": _transposed,
    "aten::cudnn_convolution_relu": _relu,
    "aten::cudnn_convolution_add_relu": _add_relu,
}
"""By operator name."""
