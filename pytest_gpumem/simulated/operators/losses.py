"""Losses and reductions made of other operators below autograd, and the tensors they keep.

Source: aten/src/ATen/native/Loss.cpp (binary_cross_entropy_with_logits, mse_loss, smooth_l1_loss:
their result is made as large as the input before the reduction shrinks it; huber_loss,
soft_margin_loss), native/cuda/Loss.cu (binary_cross_entropy), NLLLoss2d.cu, MultiMarginLoss.cu,
ReduceOps.cpp (logsumexp_out_impl), Activation.cpp (log_sigmoid_forward_cuda); LossCTC.cpp
(ctc_loss, ctc_loss_impl) and native/cuda/LossCTC.cu (ctc_loss_gpu_template,
ctc_loss_backward_gpu_template), of torch 2.6 to 2.15. cuDNN's kernel, which takes 32-bit targets in
CPU memory, is not simulated: such a loss is computed by ATen's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, first_of, passing

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2
"""at::Reduction."""


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


def _reduce_all(gpu: GPU, elements: int, dtype: torch.dtype) -> None:
    reductions.reduce(gpu, (elements,), (1,), dtype, None, reductions.SUMS)


def _elements(self: Tensor, target: Tensor) -> int:
    return math.prod(torch.broadcast_shapes(self.shape, target.shape))


def _enlarged(self: Tensor, target: Tensor, result: Tensor) -> Iterator[Tensor]:
    """Yield a result as large as the input, which shrinks where it is reduced."""
    result.untyped_storage().resize_(_elements(self, target) * result.element_size())
    yield result


def _reducing(*, in_result: bool) -> Rule:
    """Return the rule of a loss with a value of each element: in its result, or in a temporary."""

    def after(gpu: GPU, self: Tensor, target: Tensor, reduction: int, result: Tensor) -> None:
        if reduction:
            elements = _elements(self, target)
            other = Scratch(gpu, (1 if in_result else elements) * result.element_size())
            _reduce_all(gpu, elements, result.dtype)
            other.free()

    return Rule(placed=_enlarged, after=after)


def _huber(gpu: GPU, self: Tensor, reduction: int, result: Tensor) -> None:
    if reduction:
        _reduce_all(gpu, self.numel(), result.dtype)


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


# Connectionist temporal classification, by ATen's own kernels.


def _ctc_loss(overload: Any) -> Composite:
    def ctc_loss(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor | Sequence[int],
        target_lengths: Tensor | Sequence[int],
        blank: int,
        reduction: int,
        zero_infinity: bool,
        *args: Any,
    ) -> Any:
        if not log_probs.is_cuda:
            return overload.decompose(*args)
        lengths = [
            given.flatten().tolist() if isinstance(given, Tensor) else list(given)
            for given in (input_lengths, target_lengths)
        ]
        batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
        target = targets.to(log_probs.device, torch.int64)
        losses = first_of(_aten._ctc_loss.default(batched, target, *lengths, blank, zero_infinity))
        del target
        if zero_infinity:
            nothing = losses.new_zeros(())  # C++ evaluates the last arguments first
            losses = torch.where(losses == torch.inf, nothing, losses)
            del nothing
        if reduction == _MEAN:
            own = torch.tensor(lengths[1], dtype=losses.dtype, device=losses.device)
            divisors = own.clamp_min(1)
            del own
            mean = (losses / divisors).mean()
            del divisors
            return mean
        if reduction == _SUM:
            return losses.sum()
        return losses if log_probs.dim() == 3 else losses.squeeze(0)

    return ctc_loss


def _ctc_backward(log_probs: Tensor, log_alpha: Tensor) -> Tensor:
    lengths = [log_alpha.new_empty(log_probs.shape[1], dtype=torch.int64) for _ in range(3)]
    log_beta = torch.empty_like(log_alpha, memory_format=torch.contiguous_format)
    gradient = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    del log_beta, lengths
    return gradient


COMPOSITES: dict[str, Composite] = {
    "aten.ctc_loss.Tensor": _ctc_loss(_aten.ctc_loss.Tensor),
    "aten.ctc_loss.IntList": _ctc_loss(_aten.ctc_loss.IntList),
}
IN_VIEW: dict[str, Composite] = {
    "aten.logsumexp.default": logsumexp,
    "aten.soft_margin_loss_backward.default": soft_margin_loss_backward,
    "aten._ctc_loss_backward.default": _ctc_backward,
}
"""Operators that autograd sees whole and that CUDA builds from others."""

RULES = {
    # The lengths of targets and of inputs, and where each target begins.
    "_ctc_loss": Rule(
        before=lambda gpu, log_probs: Scratch(gpu, *[log_probs.shape[1] * INDEX_BYTES] * 3),
        placed=lambda result: result[::-1],
    ),
    # The buffer is empty on CUDA.
    "log_sigmoid_forward": Rule(placed=lambda result: result[:1]),
    "mse_loss smooth_l1_loss": _reducing(in_result=False),
    "binary_cross_entropy soft_margin_loss": _reducing(in_result=True),
    "huber_loss": Rule(
        before=lambda gpu, self, reduction: Scratch(gpu, self.nbytes if reduction else 0),
        after=_huber,
    ),
    "nll_loss2d_forward": Rule(placed=lambda result: result[::-1]),
    "multi_margin_loss": Rule(after=_margin_of_rows),
    "multilabel_margin_loss_forward": Rule(placed=_target_first),
}
