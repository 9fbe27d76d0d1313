"""Padding taken out and put back: flash_attn/bert_padding.py of flash-attn 2.8.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


class IndexFirstAxis(torch.autograd.Function):
    """The rows ``indices`` of a tensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor) -> Tensor:
        """Gather the rows."""
        ctx.save_for_backward(indices)
        ctx.rows, rest = values.shape[0], values.shape[1:]
        wide = indices[:, None].expand(-1, rest.numel())
        return torch.gather(values.reshape(ctx.rows, -1), 0, wide).reshape(-1, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Scatter the rows' gradients into zeros."""
        (indices,) = ctx.saved_tensors
        (grad,) = grads
        rest = grad.shape[1:]
        flat = grad.reshape(grad.shape[0], -1)
        made = torch.zeros([ctx.rows, flat.shape[1]], device=grad.device, dtype=grad.dtype)
        made.scatter_(0, indices[:, None].expand(-1, flat.shape[1]), flat)
        return made.reshape(ctx.rows, *rest), None


class IndexPutFirstAxis(torch.autograd.Function):
    """A tensor of zeros, with rows at ``indices``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, rows: int) -> Tensor:
        """Write the rows."""
        ctx.save_for_backward(indices)
        made = torch.zeros(rows, *values.shape[1:], device=values.device, dtype=values.dtype)
        made[indices] = values
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the rows at ``indices``."""
        (indices,) = ctx.saved_tensors
        return grads[0][indices], None, None


index_first_axis: Callable[..., Tensor] = IndexFirstAxis.apply
index_put_first_axis: Callable[..., Tensor] = IndexPutFirstAxis.apply


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return valid rows, their indices, starts of sequences, the longest, and used lengths."""
    masks = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = masks.sum(dim=-1, dtype=torch.int32)
    used_lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(masks.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    starts = pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, starts, int(longest), used_lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return (batch, seqlen, ...): the rows in their places, and zeros elsewhere."""
    made = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return made.reshape(batch, seqlen, *made.shape[1:])
