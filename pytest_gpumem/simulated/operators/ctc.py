"""Connectionist temporal classification, by ATen's own kernels.

Source: aten/src/ATen/native/LossCTC.cpp (ctc_loss, ctc_loss_impl) and native/cuda/LossCTC.cu
(ctc_loss_gpu_template, ctc_loss_backward_gpu_template), of torch 2.6 to 2.15. cuDNN's kernel, which
takes 32-bit targets in CPU memory, is not simulated: such a loss is computed by ATen's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, first_of

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2


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
        lengths = [_as_list(given) for given in (input_lengths, target_lengths)]
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


def _as_list(lengths: Tensor | Sequence[int]) -> list[int]:
    if isinstance(lengths, Tensor):
        return [int(length) for length in lengths.flatten().tolist()]
    return list(lengths)


COMPOSITES: dict[str, Composite] = {
    "aten.ctc_loss.Tensor": _ctc_loss(_aten.ctc_loss.Tensor),
    "aten.ctc_loss.IntList": _ctc_loss(_aten.ctc_loss.IntList),
}


def _lengths(gpu: GPU, log_probs: Tensor) -> Scratch:
    # The lengths of targets and of inputs, and where each target begins.
    return Scratch(gpu, *[log_probs.shape[1] * INDEX_BYTES] * 3)


def _outputs(result: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    yield from reversed(result)


def _backward(log_probs: Tensor, log_alpha: Tensor) -> Tensor:
    lengths = [log_alpha.new_empty(log_probs.shape[1], dtype=torch.int64) for _ in range(3)]
    log_beta = torch.empty_like(log_alpha, memory_format=torch.contiguous_format)
    gradient = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    del log_beta, lengths
    return gradient


IN_VIEW: dict[str, Composite] = {"aten._ctc_loss_backward.default": _backward}
RULES = {"aten::_ctc_loss": Rule(before=_lengths, placed=_outputs)}
