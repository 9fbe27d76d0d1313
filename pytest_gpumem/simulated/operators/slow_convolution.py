"""Convolution without cuDNN: columns of one sample, and products of matrices for each.

Source: aten/src/ATen/native/cuda/ConvolutionMM2d.cu (slow_conv2d_forward, slow_conv2d_backward,
slow_conv2d_grad_weight), NaiveDilatedConvolution.cu (slow_conv_dilated_all_cuda_template),
NaiveConvolutionTranspose2d.cu and 3d.cu, of torch 2.6 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.convolution_choice import Parameters
from pytest_gpumem.simulated.operators.rules import Scratch

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class SlowConvolution:
    """A group of a convolution, of contiguous tensors."""

    gpu: GPU
    parameters: Parameters

    def forward(
        self, input: Tensor, weight: Tensor, shape: tuple[int, ...], has_bias: bool
    ) -> Tensor:
        """Return the output of ``shape``, after everything was allocated and freed as CUDA does."""
        # Of three dimensions, transposed: empty_like(input), resized.
        is_resized = self.parameters.transposed and input.dim() == 5
        first = Scratch(self.gpu, input.nbytes if is_resized else 0)
        output = input.new_empty(shape)
        first.free()
        columns = Scratch(self.gpu)
        if self._has_columns(input, weight):
            columns.take(self._column_bytes(input, weight, shape))
        products = 1
        if self.parameters.transposed and has_bias:
            # The bias is added as its product with ones.
            columns.take(math.prod(shape[2:]) * input.element_size())
            products = 2
        self._multiply(shape[0] * products)
        return output

    def backward(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> _Gradients:
        """Return the gradients that ``mask`` selects."""
        kept = grad_output.contiguous()
        del grad_output
        if self.parameters.transposed:
            found = self._of_transposed(kept, input, weight, mask)
        elif self.parameters.dilated or input.dim() == 5:
            found = self._of_dilated(kept, input, weight, mask)
        else:
            found = self._of_images(kept, input, weight, mask)
        del input, kept
        return found

    def _of_images(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> _Gradients:
        """Return the gradients, of which two share one buffer of columns."""
        columns = Scratch(self.gpu)
        nbytes = self._column_bytes(input, weight, grad_output.shape)
        grad_input = grad_weight = None
        if mask[0]:
            grad_input = input.new_empty(input.shape)
            columns.take(nbytes)
            self._multiply(input.shape[0])
        grad_bias = _summed(grad_output) if mask[2] else None
        if mask[1]:
            grad_weight = weight.new_empty(weight.shape)
            if not mask[0] and self._has_columns(input, weight):
                columns.take(nbytes)
            self._multiply(input.shape[0])
        return grad_input, grad_weight, grad_bias

    def _of_dilated(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> _Gradients:
        """All gradients of one sample after the other."""
        grad_input = input.new_empty(input.shape) if mask[0] else None
        grad_weight = weight.new_empty(weight.shape) if mask[1] else None
        grad_bias = weight.new_empty((weight.shape[0],)) if mask[2] else None
        columns = Scratch(self.gpu, self._column_bytes(input, weight, grad_output.shape))
        for sample in grad_output:
            self._multiply(sum(map(bool, mask[:2])))
            if mask[2]:
                sample.sum([*range(1, sample.dim())])
        columns.free()
        return grad_input, grad_weight, grad_bias

    def _of_transposed(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> _Gradients:
        """Each gradient has columns of its own."""

        def multiply() -> None:
            columns = Scratch(self.gpu, self._column_bytes(input, weight, grad_output.shape))
            self._multiply(input.shape[0])
            columns.free()

        grad_input = input.new_empty(input.shape) if mask[0] else None
        if mask[0]:
            multiply()
        grad_weight = weight.new_empty(weight.shape) if mask[1] else None
        grad_bias = _summed(grad_output) if mask[2] else None
        if mask[1]:
            multiply()
        return grad_input, grad_weight, grad_bias

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            self.gpu.workspaces.gemm(self.gpu.stream)

    def _has_columns(self, input: Tensor, weight: Tensor) -> bool:
        """Return whether patches are more than the input itself."""
        parameters = self.parameters
        return (
            math.prod(weight.shape[2:]) > 1
            or parameters.transposed
            or parameters.dilated
            or any(parameters.padding)
            or set(parameters.stride) != {1}
            or input.dim() == 5
        )

    def _column_bytes(self, input: Tensor, weight: Tensor, shape: Sequence[int]) -> int:
        """Return the patches of one sample; ``shape`` is that of the output."""
        kernel = math.prod(weight.shape[2:])
        if self.parameters.transposed:
            return shape[1] * kernel * math.prod(input.shape[2:]) * input.element_size()
        return input.shape[1] * kernel * math.prod(shape[2:]) * input.element_size()


def _summed(grad_output: Tensor) -> Tensor:
    return grad_output.sum([0, *range(2, grad_output.dim())])
