"""Softmax: the product that its backward takes, and copies of tensors that are not contiguous.

Source: aten/src/ATen/native/cuda/SoftMax.cu (host_softmax, host_softmax_backward,
softmax_backward_cuda_out) and native/SoftMax.cpp (softmax and log_softmax with a ``dtype``), torch
2.6 to 2.15. Outputs come first, as of every structured operator: the meta kernels give their sizes,
types and strides as CUDA's do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides, make_contiguous_strides_for

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import copied
from pytest_gpumem.simulated.operators.rules import Composite, Rule, passing


def _forward(gpu: GPU, self: Tensor) -> None:
    passing(gpu, *copied(self))


def _log_backward(gpu: GPU, grad_output: Tensor, output: Tensor) -> None:
    passing(gpu, *copied(grad_output, output))


def _backward(gpu: GPU, grad_output: Tensor, output: Tensor) -> None:
    product = grad_output.nbytes
    again = [] if _is_product_contiguous(grad_output, output) else [product]
    passing(gpu, product, *again, *copied(output))


def _safe(gpu: GPU, dim: int, result: Tensor) -> None:
    """Allocate for ``_safe_softmax`` of native/transformers/attention.cpp."""
    rows = result.numel() // max(result.shape[dim], 1) if result.dim() else 1
    passing(gpu, result.numel(), rows, result.element_size())


def _is_product_contiguous(gradient: Tensor, output: Tensor) -> bool:
    """Return whether the product is contiguous; its strides are in the order of its factors'."""
    if gradient.is_contiguous() and output.is_contiguous():
        return True
    strides = compute_elementwise_output_strides(gradient, output)
    shape = output.shape
    expected = make_contiguous_strides_for(shape)
    return all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(shape, strides, expected, strict=True)
    )


def _of_halves(whole: Callable[..., Tensor], kernel: Callable[..., Tensor]) -> Composite:
    """``softmax(input, dim, dtype)``: of float16 to float32 one kernel, else a cast goes before."""

    def of_halves(self: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        if dtype is torch.float32 and self.dtype is torch.float16:
            return kernel(self, dim, True)
        return whole(self, dim, dtype)

    return of_halves


COMPOSITES: dict[str, Composite] = {
    f"aten.{name}.int": _of_halves(
        getattr(torch.ops.aten, name).int.decompose, getattr(torch.ops.aten, f"_{name}")
    )
    for name in ("softmax", "log_softmax")
}
"""By overload."""

RULES = {
    "aten::_softmax": Rule(after=_forward),
    "aten::_log_softmax": Rule(after=_forward),
    "aten::_softmax_backward_data": Rule(after=_backward),
    "aten::_log_softmax_backward_data": Rule(after=_log_backward),
    "aten::_safe_softmax": Rule(after=_safe),
}
