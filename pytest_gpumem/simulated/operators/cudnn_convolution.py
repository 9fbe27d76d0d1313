"""cuDNN's convolutions called by their own names, and the ones that end with an activation.

Source: aten/src/ATen/native/cudnn/ConvShared.cpp (cudnn_convolution, cudnn_convolution_transpose,
cudnn_convolution_relu, cudnn_convolution_add_relu) and native/Convolution.cpp (_convolution), torch
2.6 to 2.15. The fused ones take no other memory than the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.convolution import convolution
from pytest_gpumem.simulated.operators.rules import Composite

_Sizes = Sequence[int]


def _forward(
    gpu: GPU,
    self: Tensor,
    weight: Tensor,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    groups: int,
) -> Tensor:
    return convolution(gpu, self, weight, None, stride, padding, dilation, False, (0,), groups)


def _transposed(
    gpu: GPU,
    self: Tensor,
    weight: Tensor,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    output_padding: _Sizes,
    groups: int,
) -> Tensor:
    return convolution(
        gpu, self, weight, None, stride, padding, dilation, True, output_padding, groups
    )


IN_VIEW: dict[str, Composite] = {
    "aten.cudnn_convolution.default": _forward,
    "aten.cudnn_convolution_transpose.default": _transposed,
    "aten.cudnn_convolution_relu.default": _forward,
    "aten.cudnn_convolution_add_relu.default": _forward,
    # Its four switches at the end are those of torch's context, which hold.
    "aten._convolution.default": convolution,
}
"""By overload."""
