"""Losses and reductions made of other operators below autograd, and what they keep.

Source: aten/src/ATen/native/Loss.cpp (binary_cross_entropy_with_logits), ReduceOps.cpp
(logsumexp_out_impl), Activation.cpp (log_sigmoid_forward_cuda), BinaryOps.cpp and Loss.cpp
(mse_loss: its result is made as large as the input before the reduction shrinks it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.operators.rules import Rule, passing

if TYPE_CHECKING:
    from pytest_gpumem.simulated.device import SimulatedGPU

_aten = torch.ops.aten


def logsumexp(self: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """``aten::logsumexp`` as its native function computes it."""
    if not self.dtype.is_floating_point:
        self = self.to(torch.get_default_dtype())
    highest = torch.amax(self, dim, True)
    shift = highest if keepdim else highest.squeeze(tuple(dim))
    shift.masked_fill_(shift.abs() == math.inf, 0)
    result = torch.sum((self - highest).exp_(), dim, keepdim)
    return result.log_().add_(shift)


def _bce_with_logits(*args: Any, **kwargs: Any) -> Any:
    operator = _aten.binary_cross_entropy_with_logits.default
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


IN_VIEW: dict[str, Callable[..., Any]] = {
    "aten.binary_cross_entropy_with_logits.default": _bce_with_logits,
    "aten.logsumexp.default": logsumexp,
}
"""Operators that autograd sees whole and that CUDA builds from others."""


def _reduction(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int(args[2] if len(args) > 2 else kwargs.get("reduction", 1))


def _mse_loss_result(
    gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[Tensor]:
    if _reduction(args, kwargs):
        elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        result.untyped_storage().resize_(elements * result.element_size())
    yield result


def _mse_loss(
    gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    if _reduction(args, kwargs):
        passing(gpu, result.untyped_storage().nbytes())


def _log_sigmoid_outputs(
    gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[Tensor]:
    # The buffer is empty on CUDA.
    yield result[0]


RULES = {
    "aten::log_sigmoid_forward": Rule(placed=_log_sigmoid_outputs),
    "aten::mse_loss": Rule(after=_mse_loss, placed=_mse_loss_result),
}
