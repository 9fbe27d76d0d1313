"""Losses and reductions made of other operators below autograd, and the tensors they keep.

Source: aten/src/ATen/native/Loss.cpp (binary_cross_entropy_with_logits, mse_loss, smooth_l1_loss:
their result is made as large as the input before the reduction shrinks it; huber_loss,
soft_margin_loss), native/cuda/Loss.cu (binary_cross_entropy), NLLLoss2d.cu, MultiMarginLoss.cu,
ReduceOps.cpp (logsumexp_out_impl), Activation.cpp (log_sigmoid_forward_cuda).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, passing

_MEAN = 1
"""at::Reduction::Mean."""


def logsumexp(self: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """``aten::logsumexp`` as its native function computes it."""
    if not self.dtype.is_floating_point:
        self = self.to(torch.get_default_dtype())
    highest = torch.amax(self, dim, True)
    shift = highest if keepdim else highest.squeeze(tuple(dim))
    sizes = shift.abs()
    are_infinite = sizes == math.inf
    shift.masked_fill_(are_infinite, 0)
    del are_infinite, sizes
    result = torch.sum((self - highest).exp_(), dim, keepdim)
    result.log_().add_(shift)
    del shift, highest, self
    return result


def soft_margin_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, reduction: int
) -> Tensor:
    """``aten::soft_margin_loss_backward`` as its native function computes it."""
    norm = 1.0 / self.numel() if reduction == _MEAN else 1.0
    negative = -target
    # In C++ both live until their expression ends, the later one first.
    product = negative * self
    exponential = torch.exp(product)
    del product, negative
    result = (target * exponential).mul_(-norm)
    exponential.add_(1)
    return result.div_(exponential).mul_(grad_output)


IN_VIEW: dict[str, Composite] = {
    "aten.logsumexp.default": logsumexp,
    "aten.soft_margin_loss_backward.default": soft_margin_loss_backward,
}
"""Operators that autograd sees whole and that CUDA builds from others."""


# Each loss is reduced from one value per element; what differs is which of the two is the result.


def _reduce_all(gpu: GPU, elements: int, dtype: torch.dtype) -> None:
    reductions.reduce(gpu, (elements,), (1,), dtype, None, reductions.SUMS, dtype)


def _elements(self: Tensor, target: Tensor) -> int:
    return math.prod(torch.broadcast_shapes(self.shape, target.shape))


def _into_result(self: Tensor, target: Tensor, reduction: int, result: Tensor) -> Iterator[Tensor]:
    """Yield a result as large as the input; the values are in a temporary of that size."""
    if reduction:
        _enlarge(result, _elements(self, target))
    yield result


def _reduce_temporary(
    gpu: GPU, self: Tensor, target: Tensor, reduction: int, result: Tensor
) -> None:
    if reduction:
        elements = _elements(self, target)
        values = Scratch(gpu, elements * result.element_size())
        _reduce_all(gpu, elements, result.dtype)
        values.free()


def _in_result(self: Tensor, target: Tensor, result: Tensor) -> Iterator[Tensor]:
    """Yield the result with the values, which shrinks to their mean or sum."""
    _enlarge(result, _elements(self, target))
    yield result


def _reduce_result(gpu: GPU, self: Tensor, target: Tensor, reduction: int, result: Tensor) -> None:
    if reduction:
        reduced = Scratch(gpu, result.element_size())
        _reduce_all(gpu, _elements(self, target), result.dtype)
        reduced.free()


def _enlarge(result: Tensor, elements: int) -> None:
    result.untyped_storage().resize_(elements * result.element_size())


def _huber_values(gpu: GPU, self: Tensor, reduction: int) -> Scratch | None:
    return Scratch(gpu, self.nbytes) if reduction else None


def _huber(gpu: GPU, self: Tensor, reduction: int, result: Tensor) -> None:
    if reduction:
        _reduce_all(gpu, self.numel(), result.dtype)


def _weight_first(result: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    yield from reversed(result)


def _margin_of_rows(gpu: GPU, self: Tensor, reduction: int) -> None:
    if self.dim() == 2 and reduction:
        passing(gpu, self.shape[0] * self.element_size())


def _target_first(
    gpu: GPU, self: Tensor, reduction: int, result: tuple[Tensor, Tensor]
) -> Iterator[Tensor]:
    """Yield target flags and the loss, rows' losses between (multilabel_margin_loss_forward)."""
    yield result[1]
    is_reduced = self.dim() == 2 and reduction
    rows = Scratch(gpu, self.shape[0] * self.element_size() if is_reduced else 0)
    yield result[0]
    rows.free()


def _without_buffer(result: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    # The buffer is empty on CUDA.
    yield result[0]


_INTO_RESULT = Rule(placed=_into_result, after=_reduce_temporary)
_IN_RESULT = Rule(placed=_in_result, after=_reduce_result)
RULES = {
    "aten::log_sigmoid_forward": Rule(placed=_without_buffer),
    "aten::mse_loss": _INTO_RESULT,
    "aten::smooth_l1_loss": _INTO_RESULT,
    "aten::binary_cross_entropy": _IN_RESULT,
    "aten::soft_margin_loss": _IN_RESULT,
    "aten::huber_loss": Rule(before=_huber_values, after=_huber),
    "aten::nll_loss2d_forward": Rule(placed=_weight_first),
    "aten::multi_margin_loss": Rule(after=_margin_of_rows),
    "aten::multilabel_margin_loss_forward": Rule(placed=_target_first),
}
