"""Activations, softmax and dropout.

Source: aten/src/ATen/native/cuda/SoftMax.cu (host_softmax, host_softmax_backward,
softmax_backward_cuda_out), native/SoftMax.cpp (softmax and log_softmax with a ``dtype``),
native/Dropout.cpp (is_fused_kernel_acceptable), native/cuda/Dropout.cu (native_dropout_cuda,
dropout_cuda), native_functions.yaml (dispatch of mish_backward) and native/Activation.cpp
(mish_backward: one output of TensorIterator::binary_op), torch 2.6 to 2.15. Outputs come first, as
of every structured operator: the meta kernels give their sizes, types and strides as CUDA's do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides, make_contiguous_strides_for

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import copied
from pytest_gpumem.simulated.operators.rules import Composite, Rule, copies_of, passing

_aten = torch.ops.aten


def mish_backward(gpu: GPU, grad_output: Tensor, self: Tensor) -> Tensor:
    """``aten::mish_backward``: one kernel, and on ``meta`` a formula of several.

    The product has the shape, type and strides of its output.
    """
    result = torch.mul(grad_output, self)
    gpu.simulation.values.assign(result, _aten.mish_backward, grad_output, self)
    return result


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """``aten::dropout``: on CUDA one fused kernel with a mask of one byte per element."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    return _aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]  # an operator


def _backward(gpu: GPU, grad_output: Tensor, output: Tensor) -> None:
    """The product, whose strides are in the order of its factors', and a contiguous copy of it."""
    sizes = [grad_output.nbytes]
    if not (grad_output.is_contiguous() and output.is_contiguous()):
        strides = compute_elementwise_output_strides(grad_output, output)
        wanted = make_contiguous_strides_for(output.shape)
        compared = zip(output.shape, strides, wanted, strict=True)
        if any(size != 1 and stride != step for size, stride, step in compared):
            sizes *= 2
    passing(gpu, *sizes, *copied(output))


def _safe(gpu: GPU, dim: int, result: Tensor) -> None:
    """Allocate for ``_safe_softmax`` of native/transformers/attention.cpp."""
    rows = result.numel() // max(result.shape[dim], 1) if result.dim() else 1
    passing(gpu, result.numel(), rows, result.element_size())


def _of_halves(whole: Callable[..., Tensor], kernel: Callable[..., Tensor]) -> Composite:
    """``softmax(input, dim, dtype)``: of float16 to float32 one kernel, else a cast goes before."""

    def of_halves(self: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        if dtype is torch.float32 and self.dtype is torch.float16:
            return kernel(self, dim, True)
        return whole(self, dim, dtype)

    return of_halves


COMPOSITES: dict[str, Composite] = {
    "aten.mish_backward.default": mish_backward,
    "aten.dropout.default": dropout,
    "aten.softmax.int": _of_halves(_aten.softmax.int.decompose, _aten._softmax),
    "aten.log_softmax.int": _of_halves(_aten.log_softmax.int.decompose, _aten._log_softmax),
}

RULES = {
    "_softmax _log_softmax": Rule(after=copies_of("self")),
    "_softmax_backward_data": Rule(after=_backward),
    "_log_softmax_backward_data": Rule(after=copies_of("grad_output", "output")),
    "_safe_softmax": Rule(after=_safe),
    # dropout_cuda makes the mask first; where everything is dropped, zeros come before theirs.
    "native_dropout": Rule(
        placed=lambda p, train, result: result if p == 1 or train is False else result[::-1]
    ),
}
