"""Convolution: the choice of a kernel by ATen on CUDA, and the kernels without cuDNN.

These make columns of one sample at a time, and multiply matrices.

Source: aten/src/ATen/native/Convolution.cpp (_select_conv_backend, ConvParams), ConvUtils.h
(cudnn_conv_suggest_memory_format), cuda/ConvolutionMM2d.cu (slow_conv2d_forward,
slow_conv2d_backward, slow_conv2d_grad_weight), NaiveDilatedConvolution.cu
(slow_conv_dilated_all_cuda_template), NaiveConvolutionTranspose2d.cu and 3d.cu, of torch 2.6 to
2.15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import HALF_DTYPES, INDEXABLE, suggested_format
from pytest_gpumem.simulated.operators.rules import Gradients, Scratch

CUDNN, DEPTHWISE, SLOW = "cudnn", "depthwise", "slow"
"""Kernels: ConvBackend::Cudnn and CudnnTranspose, CudaDepthwise2d and 3d, Slow*."""

_BROKEN_VOLUMES = frozenset({(2, 9), (2, 10)})
"""Releases with a cuDNN from 9.8 to 9.14, which they do not use for 3-d convolutions of halves."""
CONTIGUOUS = torch.contiguous_format


@dataclass(frozen=True)
class Parameters:
    """ConvParams, of a convolution with at least two spatial dims."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def dilated(self) -> bool:
        """Whether any dimension is dilated."""
        return any(step != 1 for step in self.dilation)

    def output_shape(self, input: Sequence[int], weight: Sequence[int]) -> tuple[int, ...]:
        """Return conv_output_size, or conv_input_size if transposed."""
        spatial = []
        for at, size in enumerate(input[2:]):
            reach = self.dilation[at] * (weight[at + 2] - 1)
            if self.transposed:
                full = (size - 1) * self.stride[at] - 2 * self.padding[at] + reach + 1
                spatial.append(full + self.output_padding[at])
            else:
                spatial.append((size + 2 * self.padding[at] - reach - 1) // self.stride[at] + 1)
        channels = weight[1] * self.groups if self.transposed else weight[0]
        return (input[0], channels, *spatial)


def kernel_of(gpu: GPU, parameters: Parameters, input: Tensor, weight: Tensor) -> str:
    """Return the kernel that _select_conv_backend chooses for CUDA tensors."""
    is_for_cudnn = _is_for_cudnn(gpu, parameters, input, weight)
    depthwise = (
        not parameters.transposed
        and input.shape[1] == parameters.groups > 1
        and not weight.shape[0] % input.shape[1]
    )
    if not depthwise:
        return CUDNN if is_for_cudnn else SLOW
    if common_format(input, weight) is CONTIGUOUS:
        is_for_cudnn = is_for_cudnn and _is_half_depthwise(gpu, parameters, input, weight)
    return CUDNN if is_for_cudnn else DEPTHWISE


def _is_for_cudnn(gpu: GPU, parameters: Parameters, input: Tensor, weight: Tensor) -> bool:
    if not torch.backends.cudnn.enabled:
        return False
    is_ampere = gpu.model.compute_capability >= (8, 0)
    if torch.bfloat16 in (input.dtype, weight.dtype) and not is_ampere:
        return False
    if (
        gpu.version in _BROKEN_VOLUMES
        and input.dtype in HALF_DTYPES
        and weight.dim() == 5
        and set(weight.shape[2:]) != {1}
        and common_format(input, weight) is CONTIGUOUS
    ):
        return False
    # cuDNN 9.3, in the wheels of 2.7 and later, indexes with 64 bits.
    if gpu.version < (2, 7):
        sizes = input.shape, parameters.output_shape(input.shape, weight.shape)
        if any(math.prod(size[1:]) > INDEXABLE for size in sizes):
            return False  # needs_64bit_indexing_no_split
    if (
        gpu.version < (2, 9)
        and torch.backends.cudnn.deterministic
        and parameters.dilated
        and common_format(input, weight) is CONTIGUOUS
    ):
        return False
    paddings = zip(parameters.output_padding, parameters.stride, strict=True)
    return all(padding < step for padding, step in paddings)


def _is_half_depthwise(gpu: GPU, parameters: Parameters, input: Tensor, weight: Tensor) -> bool:
    stride = parameters.stride
    return (
        input.dtype == weight.dtype == torch.float16
        and input.dim() == 4
        and not parameters.dilated
        and (stride[0] == stride[1] or input.shape[2] == 1)
        and input.shape[1] >= 32
        and gpu.model.compute_capability >= (7, 0)
        and _suits_cudnn_depthwise(tuple(input.shape), stride[1], tuple(weight.shape[2:]))
    )


def common_format(one: Tensor, other: Tensor) -> torch.memory_format:
    """Return cudnn_conv_suggest_memory_format: channels last if either operand is."""
    if torch.float64 in (one.dtype, other.dtype):
        return CONTIGUOUS
    found = suggested_format(one)
    return found if found is not CONTIGUOUS else suggested_format(other)


def _suits_cudnn_depthwise(input: tuple[int, ...], stride: int, kernel: tuple[int, ...]) -> bool:
    """Return check_cudnn_depthwise_workload_with_filter: whether cuDNN's half kernel is faster."""
    batch, channels, height, width = input
    if height == 1 and stride == 1:
        return True
    if kernel[0] != kernel[1] or kernel[1] not in (1, 3, 5) or width < 7:
        return False
    if stride != 2:
        return stride == 1
    if kernel[1] == 1:
        if batch == 1:
            return width <= 28
        return batch <= 16 and channels >= 128 and width <= 7
    return batch == 1 or channels >= 512 or (channels >= 256 and width >= 28)


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
        with Scratch(self.gpu, input.nbytes if is_resized else 0):
            output = input.new_empty(shape)
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
    ) -> Gradients:
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
    ) -> Gradients:
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
    ) -> Gradients:
        """Return the gradients, computed sample by sample."""
        grad_input = input.new_empty(input.shape) if mask[0] else None
        grad_weight = weight.new_empty(weight.shape) if mask[1] else None
        grad_bias = weight.new_empty((weight.shape[0],)) if mask[2] else None
        with Scratch(self.gpu, self._column_bytes(input, weight, grad_output.shape)):
            for sample in grad_output:
                self._multiply(sum(map(bool, mask[:2])))
                if mask[2]:
                    sample.sum([*range(1, sample.dim())])
        return grad_input, grad_weight, grad_bias

    def _of_transposed(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> Gradients:
        """Return the gradients, each with columns of its own."""

        def multiply() -> None:
            with Scratch(self.gpu, self._column_bytes(input, weight, grad_output.shape)):
                self._multiply(input.shape[0])

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
        """Return whether the columns differ from the input itself."""
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
        """Return the bytes of one sample's columns; ``shape`` is that of the output."""
        kernel = math.prod(weight.shape[2:])
        if self.parameters.transposed:
            return shape[1] * kernel * math.prod(input.shape[2:]) * input.element_size()
        return input.shape[1] * kernel * math.prod(shape[2:]) * input.element_size()


def _summed(grad_output: Tensor) -> Tensor:
    """Return what C++ sums into a bias of its own, so that autocast does not cast it."""
    dims = [0, *range(2, grad_output.dim())]
    return grad_output.sum(dims, dtype=grad_output.dtype)
