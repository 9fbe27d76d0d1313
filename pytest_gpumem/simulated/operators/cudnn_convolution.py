"""cuDNN's convolutions called by their own names, and the ones that end with an activation.

Source: aten/src/ATen/native/cudnn/ConvShared.cpp (cudnn_convolution, cudnn_convolution_transpose,
cudnn_convolution_relu, cudnn_convolution_add_relu) and native/Convolution.cpp (_convolution), torch
2.6 to 2.15. The fused ones take no other memory than the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.convolution import convolution
from pytest_gpumem.simulated.operators.rules import Composite, OnDevice

_Sizes = Sequence[int]


def _forward(
    gpu: GPU,
    input: Tensor,
    weight: Tensor,
    padding: _Sizes,
    stride: _Sizes,
    dilation: _Sizes,
    groups: int,
    *_: bool,
) -> Tensor:
    return convolution(gpu, input, weight, None, stride, padding, dilation, False, (0,), groups)


def _transposed(
    gpu: GPU,
    input: Tensor,
    weight: Tensor,
    padding: _Sizes,
    output_padding: _Sizes,
    stride: _Sizes,
    dilation: _Sizes,
    groups: int,
    *_: bool,
) -> Tensor:
    return convolution(
        gpu, input, weight, None, stride, padding, dilation, True, output_padding, groups
    )


def _relu(
    gpu: GPU,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    groups: int,
) -> Tensor:
    return convolution(gpu, input, weight, None, stride, padding, dilation, False, (0,), groups)


def _add_relu(
    gpu: GPU,
    input: Tensor,
    weight: Tensor,
    z: Tensor,
    alpha: float | None,
    bias: Tensor | None,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    groups: int,
) -> Tensor:
    return convolution(gpu, input, weight, None, stride, padding, dilation, False, (0,), groups)


def _any(gpu: GPU, *args: Any) -> Tensor:
    """Without the four switches at the end: those of torch's context hold."""
    return convolution(gpu, *args[:9])


IN_VIEW: dict[str, Composite] = {
    "aten.cudnn_convolution.default": OnDevice(_forward),
    "aten.cudnn_convolution_transpose.default": OnDevice(_transposed),
    "aten.cudnn_convolution_relu.default": OnDevice(_relu),
    "aten.cudnn_convolution_add_relu.default": OnDevice(_add_relu),
    "aten._convolution.default": OnDevice(_any),
}
"""By overload."""
