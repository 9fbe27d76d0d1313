"""``xentropy_cuda``, and ``apex.contrib.xentropy`` over it, of apex 25.09.

Source: apex/contrib/csrc/xentropy/xentropy_kernel.cu (``host_softmax_xentropy``,
``host_softmax_xentropy_backward``) and apex/contrib/xentropy/softmax_xentropy.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.registering import compiled
from pytest_gpumem.simulated.stand_ins.usage import used


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _forward(
    logits: Tensor, labels: Tensor, smoothing: float, half_to_float: bool
) -> tuple[Tensor, Tensor]:
    used("apex")
    _require(
        not half_to_float or logits.dtype == torch.float16,
        "conversion is supported for Half type only",
    )
    _require(labels.dtype == torch.int64, "Label type should be CUDA Long")
    given = logits.contiguous()
    sums = torch.empty_like(labels, dtype=torch.float32 if half_to_float else given.dtype)
    losses = torch.empty_like(labels, dtype=torch.float32)
    _require(given.dim() == 2, "Currently only 2 dim input supported")
    _require(labels.dim() == 1, "Labels should be 1 dimensional")
    _require(len(given) == len(labels), "Input and label should have same number of examples")
    return losses, sums


def _backward(
    grad: Tensor, logits: Tensor, sums: Tensor, labels: Tensor, smoothing: float
) -> Tensor:
    used("apex")
    made = torch.empty_like(logits)
    given = grad.contiguous(), logits.contiguous()
    _require(len(given[0]) == len(labels), "Label and loss should have same number of examples")
    return made


XENTROPY: Mapping[str, Any] = {"forward": compiled(_forward), "backward": compiled(_backward)}
"""``xentropy_cuda``, by the names of its functions."""


class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    """Losses of rows, whose softmax is made anew for the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Return (rows,) in float32."""
        losses, sums = XENTROPY["forward"](logits, labels, smoothing, half_to_float)
        losses.masked_fill_(labels == padding_idx, 0)
        ctx.save_for_backward(logits, sums, labels)
        ctx.options = smoothing, padding_idx
        made: Tensor = losses
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make the gradient of logits."""
        logits, sums, labels = ctx.saved_tensors
        smoothing, padding_idx = ctx.options
        grad = grads[0].contiguous()
        grad.masked_fill_(labels == padding_idx, 0)
        made = XENTROPY["backward"](grad, logits, sums, labels, smoothing)
        return made, None, None, None, None
