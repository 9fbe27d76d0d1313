"""cuDNN's convolutions called by their own names, and the ones that end with an activation.

Source: aten/src/ATen/native/cudnn/ConvShared.cpp (cudnn_convolution, cudnn_convolution_transpose,
cudnn_convolution_relu, cudnn_convolution_add_relu) and native/Convolution.cpp (_convolution), torch
2.6 to 2.15. The fused ones take no other memory than the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pytest_gpumem.simulated.operators.convolution import convolution

_Sizes = Sequence[int]


def _forward(
    input: Tensor,
    weight: Tensor,
    padding: _Sizes,
    stride: _Sizes,
    dilation: _Sizes,
    groups: int,
    *_: bool,
) -> Tensor:
    return convolution(input, weight, None, stride, padding, dilation, False, (0,), groups)


def _transposed(
    input: Tensor,
    weight: Tensor,
    padding: _Sizes,
    output_padding: _Sizes,
    stride: _Sizes,
    dilation: _Sizes,
    groups: int,
    *_: bool,
) -> Tensor:
    return convolution(input, weight, None, stride, padding, dilation, True, output_padding, groups)


def _relu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    groups: int,
) -> Tensor:
    return convolution(input, weight, None, stride, padding, dilation, False, (0,), groups)


def _add_relu(
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
    return convolution(input, weight, None, stride, padding, dilation, False, (0,), groups)


def _any(*args: Any) -> Tensor:
    """Without the four switches at the end: those of torch's context hold."""
    return convolution(*args[:9])


IN_VIEW: dict[str, Callable[..., Any]] = {
    "aten.cudnn_convolution.default": _forward,
    "aten.cudnn_convolution_transpose.default": _transposed,
    "aten.cudnn_convolution_relu.default": _relu,
    "aten.cudnn_convolution_add_relu.default": _add_relu,
    "aten._convolution.default": _any,
}
"""By overload."""
