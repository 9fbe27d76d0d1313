"""Convolution: allocations of the kernel that ATen takes on CUDA, in order.

Source: aten/src/ATen/native/Convolution.cpp (_convolution, convolution_backward),
native/cudnn/ConvShared.cpp (cudnn_convolution and its _transpose, _relu and _add_relu) and
Conv_v8.cpp (run_conv_plan), native/cuda/DepthwiseConv2d.cu and DepthwiseConv3d.cu, of torch 2.6 to
2.15. cuDNN's workspace comes from :mod:`cudnn`, and what runs without cuDNN from
:mod:`convolution_choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import cudnn
from pytest_gpumem.simulated.operators.convolution_choice import (
    CONTIGUOUS,
    CUDNN,
    SLOW,
    Parameters,
    SlowConvolution,
    common_format,
    kernel_of,
)
from pytest_gpumem.simulated.operators.layout import suggested_format
from pytest_gpumem.simulated.operators.rules import Composite, Gradients, Scratch

_Sizes = Sequence[int]


def _convolution(*args: Any) -> Any:
    """Run ``aten::convolution``: ``_convolution`` with four switches of torch's context."""
    explicit = torch._C.DispatchKey.CompositeExplicitAutograd
    switches = False, False, True, True
    return torch.ops.aten._convolution.default._op_dk(explicit, *args, *switches)


def _convolve(
    gpu: GPU,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    transposed: bool,
    output_padding: _Sizes,
    groups: int,
) -> Tensor:
    """Run ``aten::convolution_overrideable``, which is for devices other than CPU and CUDA."""
    for tensor, name in ((weight, "weight"), (bias, "bias")):
        if tensor is not None and (tensor.dtype != input.dtype or tensor.device != input.device):
            types = [f"{each.dtype} on {each.device}" for each in (input, tensor)]
            raise RuntimeError(
                f"Input type ({types[0]}) and {name} type ({types[1]}) should be the same"
            )
    sizes = tuple(stride), tuple(padding), tuple(dilation)
    parameters = Parameters(*sizes, transposed, tuple(output_padding), groups)
    return ConvolutionCall(gpu, parameters).forward(input, weight, bias)


def _backward(
    gpu: GPU,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    transposed: bool,
    output_padding: _Sizes,
    groups: int,
    output_mask: Sequence[bool],
) -> Gradients:
    sizes = tuple(stride), tuple(padding), tuple(dilation)
    parameters = Parameters(*sizes, transposed, tuple(output_padding), groups)
    return ConvolutionCall(gpu, parameters).backward(grad_output, input, weight, output_mask)


def _by_cudnn(
    gpu: GPU,
    self: Tensor,
    weight: Tensor,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    groups: int,
    output_padding: _Sizes | None = None,
) -> Tensor:
    transposed = output_padding is not None
    settings = stride, padding, dilation, transposed, output_padding or [0] * len(stride), groups
    return _convolve(gpu, self, weight, None, *settings)


BELOW_AUTOGRAD: dict[str, Composite] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_overrideable.default": _convolve,
    "aten.convolution_backward_overrideable.default": _backward,
    # The fused ones take no other memory than the convolution.
    "aten.cudnn_convolution.default": _by_cudnn,
    "aten.cudnn_convolution_transpose.default": _by_cudnn,
    "aten.cudnn_convolution_relu.default": _by_cudnn,
    "aten.cudnn_convolution_add_relu.default": _by_cudnn,
}


@dataclass(frozen=True)
class ConvolutionCall:
    """A convolution on a device."""

    gpu: GPU
    parameters: Parameters

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output, after everything was allocated and freed as CUDA does."""
        kernel = kernel_of(self.gpu, self.parameters, input, weight)
        shape = self.parameters.output_shape(input.shape, weight.shape)
        if kernel == CUDNN:
            direction = cudnn.INPUT if self.parameters.transposed else cudnn.FORWARD
            given = input.contiguous(memory_format=common_format(input, weight))
            output = self._convolve(direction, given, weight, shape)
            del given
            if bias is not None:
                output.add_(bias.view(1, -1, *[1] * (input.dim() - 2)))
            return output
        if kernel == SLOW:
            return self._slow_forward(input, weight, shape, bias is not None)
        return _depthwise_forward(input, weight, bias, shape)

    def _convolve(self, direction: str, given: Tensor, weight: Tensor, shape: _Sizes) -> Tensor:
        """Run cudnn_convolution, or cudnn_convolution_backward_input for the direction ``INPUT``.

        The output of a transposed one is computed as the gradient of an input, and the reverse.
        """
        memory_format = common_format(given, weight)
        made = _empty(shape, given, memory_format)
        if made.numel() or direction == cudnn.INPUT:
            kept = [
                weight.contiguous(memory_format=memory_format),
                given.contiguous(memory_format=memory_format),
            ]
            input, output = (given, made) if direction == cudnn.FORWARD else (made, given)
            self._take_workspace(direction, input, weight, output, memory_format is not CONTIGUOUS)
            del kept
        return made

    def _convolve_weight(self, grad_output: Tensor, input: Tensor, shape: _Sizes) -> Tensor:
        """Run cudnn_convolution_backward_weight."""
        memory_format = common_format(input, grad_output)
        kept = [
            grad_output.contiguous(memory_format=memory_format),
            input.contiguous(memory_format=memory_format),
        ]
        grad_weight = _empty(shape, grad_output, memory_format)
        self._take_workspace(
            cudnn.WEIGHT, input, grad_weight, grad_output, memory_format is not CONTIGUOUS
        )
        del kept
        return grad_weight

    def _take_workspace(
        self, direction: str, input: Tensor, weight: Tensor, output: Tensor, channels_last: bool
    ) -> None:
        """Allocate the workspace of run_conv_plan, for the time of the call.

        Where it does not fit, cuDNN's next plans are tried, of which the last ones need none, and
        the one that ran is kept for such calls (try_configs and benchmark_cache in Conv_v8.cpp).
        """
        parameters, capability = self.parameters, self.gpu.model.compute_capability
        call = cudnn.Convolution(
            direction,
            tuple(input.shape),
            output.shape[1],
            tuple(weight.shape[2:]),
            parameters.stride,
            parameters.dilation,
            parameters.groups,
            input.nbytes,
            weight.nbytes,
            output.nbytes,
            input.element_size(),
            channels_last,
            cudnn.on_tensor_cores(input.dtype == torch.float32, input.element_size(), capability),
            capability,
        )
        without = self.gpu.calls_without_workspace
        nbytes = 0 if without and call in without else cudnn.convolution_bytes(call)
        if nbytes:
            dims = 1 if weight.shape[2] == 1 < weight.shape[3] else weight.dim() - 2
            try:
                Scratch(self.gpu).estimate(nbytes, "cuDNN", f"conv{dims}d ({direction})")
            except torch.OutOfMemoryError:
                without.add(call)

    def _slow_forward(
        self, input: Tensor, weight: Tensor, shape: tuple[int, ...], has_bias: bool
    ) -> Tensor:
        """Run Slow2d, SlowDilated2d and 3d, SlowTranspose2d and 3d, group after group."""
        slow = SlowConvolution(self.gpu, self.parameters)
        groups = self.parameters.groups
        input, weight = input.contiguous(), weight.contiguous()
        if groups == 1:
            return slow.forward(input, weight, shape, has_bias)
        part = (shape[0], shape[1] // groups, *shape[2:])
        chunks = zip(input.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
        outputs = [slow.forward(own.contiguous(), each, part, has_bias) for own, each in chunks]
        return torch.cat(outputs, 1)

    def backward(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> Gradients:
        """Return the gradients that ``mask`` selects."""
        kernel = kernel_of(self.gpu, self.parameters, input, weight)
        if kernel == SLOW:
            return self._slow_backward(grad_output, input, weight, mask)
        if kernel == CUDNN:
            kept = input
            if mask[1]:
                kept = input.contiguous(memory_format=common_format(input, weight))
            grad_input, grad_weight = self._cudnn_backward(grad_output, kept, weight, mask)
            del kept
        elif input.dim() == 5:
            return _depthwise_volume_backward(grad_output, input, weight, mask)
        else:
            grad_input, grad_weight = _depthwise_backward(grad_output, input, weight, mask)
        return grad_input, grad_weight, _bias_gradient(grad_output) if mask[2] else None

    def _cudnn_backward(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        memory_format = suggested_format(input)
        transposed = self.parameters.transposed
        if transposed or suggested_format(grad_output) is not memory_format:
            grad_output = grad_output.contiguous(memory_format=memory_format)
        grad_input = grad_weight = None
        if mask[0]:
            direction = cudnn.FORWARD if transposed else cudnn.INPUT
            grad_input = self._convolve(direction, grad_output, weight, input.shape)
        if mask[1]:
            pair = (input, grad_output) if transposed else (grad_output, input)
            grad_weight = self._convolve_weight(*pair, weight.shape)
        return grad_input, grad_weight

    def _slow_backward(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> Gradients:
        groups = self.parameters.groups
        input, weight = input.contiguous(), weight.contiguous()
        slow = SlowConvolution(self.gpu, self.parameters)
        if groups == 1:
            return slow.backward(grad_output, input, weight, mask)
        chunks = grad_output.chunk(groups, 1), input.chunk(groups, 1), weight.chunk(groups, 0)
        parts: list[list[Tensor]] = [[], [], []]
        for own_grad, own, filters in zip(*chunks, strict=True):
            # Named here: where Dynamo has replaced the interpreter's evaluation of frames,
            # arguments without a name live until the call has returned.
            own_grad, own = own_grad.contiguous(), own.contiguous()
            gradients = slow.backward(own_grad, own, filters, mask)
            del own, own_grad
            for among, gradient in zip(parts, gradients, strict=True):
                among += [gradient] if gradient is not None else []
            del gradients, gradient
        result = [
            torch.cat(among, dim) if among else None
            for among, dim in zip(parts, (1, 0, 0), strict=True)
        ]
        for among in reversed(parts):
            while among:
                del among[0]
        return result[0], result[1], result[2]


def _empty(shape: _Sizes, like: Tensor, memory_format: torch.memory_format) -> Tensor:
    return torch.empty(
        tuple(shape), dtype=like.dtype, device=like.device, memory_format=memory_format
    )


def _bias_gradient(grad_output: Tensor) -> Tensor:
    # Where autocast casts the sum, the engine casts the gradient back.
    return grad_output.sum([0, *range(2, grad_output.dim())])


def _depthwise_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    """Run conv_depthwise2d_cuda or conv_depthwise3d_cuda, which add the bias in their kernels."""
    input = input.contiguous()
    output = input.new_empty(shape) if input.dim() == 5 else None
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    if output is None:
        output = input.new_empty(shape)
    del bias, weight, input
    return output


def _depthwise_volume_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
) -> Gradients:
    """Run conv_depthwise3d_backward_cuda."""
    grad_input = grad_output.new_empty(input.shape) if mask[0] else None
    grad_weight = grad_output.new_empty(weight.shape) if mask[1] else None
    kept = grad_output.contiguous()
    if mask[0]:
        weight.contiguous()
    if mask[1]:
        input.contiguous()
    grad_bias = _bias_gradient(grad_output) if mask[2] else None
    del kept
    return grad_input, grad_weight, grad_bias


def _depthwise_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Run conv_depthwise2d_backward_cuda_out."""
    grad_input = grad_weight = None
    kept = grad_output.contiguous()
    if mask[1]:
        copied = input.contiguous()
        grad_weight = kept.new_empty(weight.shape)
        del copied
    if mask[0]:
        copied = weight.contiguous()
        grad_input = kept.new_empty(input.shape)
        del copied
    return grad_input, grad_weight
