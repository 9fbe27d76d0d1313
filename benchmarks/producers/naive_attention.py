"""Attention by einsum and a softmax by hand, one forward and backward pass.

Recorded: silmont2000/assignment2-systems 133f0643, cs336_systems/trace_peak_memory.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    """By hand."""
    highest = x.max(dim=-1, keepdim=True).values
    above = torch.exp(x - highest)
    below = torch.sum(above, dim=-1, keepdim=True)
    return above / below


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by products."""
    scores = torch.einsum("abc,adc->abd", q, k)
    scores = scores / q.shape[-1] ** 0.5
    weights = softmax(scores)
    return torch.einsum("abc,acd->abd", weights, v)


def step() -> list[Any]:
    """Returns what lives at the end."""
    q, k, v = (torch.randn(8, 4096, 16, device="cuda", requires_grad=True) for _ in range(3))
    output = attend(q, k, v)
    loss = output.sum()
    loss.backward()
    return [q, k, v, output, loss]
