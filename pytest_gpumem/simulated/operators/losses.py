"""Losses and reductions made of other operators below autograd, and what they keep.

Source: aten/src/ATen/native/Loss.cpp (binary_cross_entropy_with_logits, mse_loss, smooth_l1_loss:
their result is made as large as the input before the reduction shrinks it; huber_loss,
soft_margin_loss), native/cuda/Loss.cu (binary_cross_entropy), NLLLoss2d.cu, MultiMarginLoss.cu,
ReduceOps.cpp (logsumexp_out_impl), Activation.cpp (log_sigmoid_forward_cuda).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, passing

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import GPU

_MEAN = 1
"""at::Reduction::Mean."""


def logsumexp(self: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """``aten::logsumexp`` as its native function computes it."""
    if not self.dtype.is_floating_point:
        self = self.to(torch.get_default_dtype())
    highest = torch.amax(self, dim, True)
    shift = highest if keepdim else highest.squeeze(tuple(dim))
    shift.masked_fill_(shift.abs() == math.inf, 0)
    result = torch.sum((self - highest).exp_(), dim, keepdim)
    return result.log_().add_(shift)


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


IN_VIEW: dict[str, Callable[..., Any]] = {
    "aten.logsumexp.default": logsumexp,
    "aten.soft_margin_loss_backward.default": soft_margin_loss_backward,
}
"""Operators that autograd sees whole and that CUDA builds from others."""


# Each loss is reduced from one value per element; what differs is which of the two is the result.


def _reduction(args: tuple[Any, ...], kwargs: dict[str, Any], at: int) -> int:
    return int(args[at] if len(args) > at else kwargs.get("reduction", 1))


def _reduce_all(gpu: GPU, elements: int, dtype: torch.dtype) -> None:
    reductions.reduce(gpu, (elements,), (1,), dtype, None, reductions.SUMS, dtype)


def _elements(args: tuple[Any, ...]) -> int:
    return math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))


def _into_result(at: int) -> Rule:
    """The result is as large as the input; the values are in a temporary of that size."""

    def placed(
        gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Iterator[Tensor]:
        if _reduction(args, kwargs, at):
            result.untyped_storage().resize_(_elements(args) * result.element_size())
        yield result

    def after(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        if _reduction(args, kwargs, at):
            elements = _elements(args)
            scratch = Scratch(gpu)
            scratch.take(elements * result.element_size())
            _reduce_all(gpu, elements, result.dtype)
            scratch.free()

    return Rule(placed=placed, after=after)


def _in_result(at: int) -> Rule:
    """The values are in the result, which shrinks to their mean or sum."""

    def placed(
        gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Iterator[Tensor]:
        result.untyped_storage().resize_(_elements(args) * result.element_size())
        yield result

    def after(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        if _reduction(args, kwargs, at):
            scratch = Scratch(gpu)
            scratch.take(result.element_size())
            _reduce_all(gpu, _elements(args), result.dtype)
            scratch.free()

    return Rule(placed=placed, after=after)


def _huber_values(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    if not _reduction(args, kwargs, 2):
        return None
    scratch = Scratch(gpu)
    scratch.take(args[0].nbytes)
    return scratch


def _huber(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
    if _reduction(args, kwargs, 2):
        _reduce_all(gpu, args[0].numel(), result.dtype)


def _weight_first(
    gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[Tensor]:
    yield from (result[1], result[0])


def _margin_of_rows(at: int) -> Rule:
    def after(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        scores = args[0]
        if scores.dim() == 2 and _reduction(args, kwargs, at):
            passing(gpu, scores.shape[0] * scores.element_size())

    return Rule(after=after)


def _log_sigmoid_outputs(
    gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[Tensor]:
    # The buffer is empty on CUDA.
    yield result[0]


RULES = {
    "aten::log_sigmoid_forward": Rule(placed=_log_sigmoid_outputs),
    "aten::mse_loss": _into_result(2),
    "aten::smooth_l1_loss": _into_result(2),
    "aten::binary_cross_entropy": _in_result(3),
    "aten::soft_margin_loss": _in_result(2),
    "aten::huber_loss": Rule(before=_huber_values, after=_huber),
    "aten::nll_loss2d_forward": Rule(placed=_weight_first),
    "aten::multi_margin_loss": _margin_of_rows(5),
    "aten::multilabel_margin_loss_forward": _margin_of_rows(2),
}
