"""What models of the Llama family share: positions as rotations, keys and values for every head."""

from __future__ import annotations

import torch
from torch import Tensor


def turned(x: Tensor) -> Tensor:
    """The halves of every head, exchanged."""
    half = x.shape[-1] // 2
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat((-second, first), dim=-1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with their positions."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated_q = (q * cos) + (turned(q) * sin)
    rotated_k = (k * cos) + (turned(k) * sin)
    return rotated_q, rotated_k


def repeated(x: Tensor, times: int) -> Tensor:
    """Keys or values for every head."""
    batch, heads, length, size = x.shape
    # Whole slices are nodes of autograd, too, which allocate on the way back.
    x = x[:, :, None, :, :].expand(batch, heads, times, length, size)
    return x.reshape(batch, heads * times, length, size)
