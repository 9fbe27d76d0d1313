"""Attention by hand, compiled and not, over sizes: two sweeps that print what is allocated.

``plain_sweep`` is TianqGuo/MachineLearningNotes 392b93ce, benchmark_compiled_attention.py of the
course's second assignment; ``masked_sweep`` is yyin-dev/cs336-a2 49f02b90, benchmark_attention.py.
Both go through all sizes in one process, so that torch.compile sees sizes change: it compiles anew
for a second size, with symbols for what has changed, and gives up at its limit of eight.
Repetitions that change nothing are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

MIB = 2**20
BATCH, WIDTHS, LENGTHS = 8, (16, 32, 64, 128), (256, 1024, 4096, 8192, 16_384)
REPEATED = 3

Attention = Callable[..., Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax of the scores times the values."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / np.sqrt(q.size(-1))
    weights = torch.nn.functional.softmax(scores, dim=-1)
    return torch.matmul(weights, v)


def softmax(x: Tensor) -> Tensor:
    """By hand."""
    below = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(below)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same with a mask, and all by hand."""
    scores = torch.einsum("...md,...nd->...mn", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...mn,...nd->...md", weights, v)


def plain_sweep() -> Iterator[tuple[int, int, bool, int, int]]:
    """Width, length, whether compiled, bytes allocated before backward and the peak."""
    for width in WIDTHS:
        for length in LENGTHS:
            for compiled in (False, True):
                attention = torch.compile(plain) if compiled else plain
                yield width, length, compiled, *_plain_run(attention, width, length)


def _plain_run(attention: Attention, width: int, length: int) -> tuple[int, int]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    q, k, v = (
        torch.randn(BATCH, length, width, device="cuda", requires_grad=True) for _ in range(3)
    )
    for _ in range(REPEATED):
        output = attention(q, k, v)
        loss = output.sum()
        loss.backward()
        q.grad = k.grad = v.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(REPEATED):
        output = attention(q, k, v)
    before = torch.cuda.memory_allocated()
    for _ in range(REPEATED):
        output = attention(q, k, v)
        loss = output.sum()
        q.grad = k.grad = v.grad = None
        loss.backward()
    return before, torch.cuda.max_memory_allocated()


def masked_sweep(attention: Attention) -> Iterator[tuple[int, int, int]]:
    """Width, length, and bytes allocated after some forward passes."""
    for width in WIDTHS:
        for length in LENGTHS:
            q, k, v = (
                torch.rand(BATCH, length, width, requires_grad=True, device="cuda")
                for _ in range(3)
            )
            mask = torch.tril(torch.ones((length, length), device="cuda")).bool()
            for _ in range(REPEATED):
                out = attention(q, k, v, mask)
                loss = out.sum()
                loss.backward()
            for _ in range(REPEATED):
                out = attention(q, k, v, mask)
            yield width, length, torch.cuda.memory_allocated()
            out = attention(q, k, v, mask)
            loss = out.sum()
            loss.backward(retain_graph=True)
            torch.cuda.empty_cache()
