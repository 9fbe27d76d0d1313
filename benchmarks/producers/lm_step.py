"""A language model written from tensors: one forward pass, or a step with torch's AdamW.

Recorded: CliffKai/assignment2-systems 6051f1e4, cs336_systems/benchmark.py, batch 4, context 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH = 10_000, 128, 4
SIZES = {"small": (768, 3072, 12, 12), "medium": (1024, 4096, 24, 16)}
"""Width, inner width, layers, heads."""


class Product(nn.Module):
    """Linear without bias, by einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T``."""
        return torch.einsum("abc,dc->abd", x, self.weight)


class Table(nn.Module):
    """An embedding, by indexing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, width))

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the table."""
        return self.weight[x, :]


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight."""
        dtype = x.dtype
        x = x.to(torch.float32)
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * root
        return (self.weight * x).to(dtype)


class Rotation(nn.Module):
    """Rotary positions; one for the whole model."""

    table: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, LENGTH, size // 2), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` rotated."""
        x1, x2 = x.reshape(*x.shape[:-1], -1, 2).permute(4, 0, 1, 2, 3)
        cos, sin = self.table[:, positions]
        first = cos * x1 - sin * x2
        second = sin * x1 + cos * x2
        result = torch.cat([first[..., None], second[..., None]], -1)
        return result.reshape(*first.shape[:-1], -1).contiguous()


def softmax(x: Tensor) -> Tensor:
    """By hand."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked attention by products."""
    scores = torch.einsum("abcd,abed->abce", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("abcd,abde->abce", weights, v)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, width: int, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (Product(width, width) for _ in range(3))
        self.out = Product(width, width)
        self.rotation = rotation

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The layer's output; ``positions`` stands among the arguments, so it dies before q."""
        length = x.shape[1]
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        q, k, v = (t.reshape(*t.shape[:2], self.heads, -1).permute(0, 2, 1, 3) for t in (q, k, v))
        positions = torch.arange(length, device=x.device)
        q = self.rotation(q, positions)
        k = self.rotation(k, positions)
        numbers = torch.arange(length, device=x.device)
        rows, columns = numbers[None, None, :, None], numbers[None, None, None, :]
        mask = rows >= columns
        attended = attend(q, k, v, mask)
        attended = attended.permute(0, 2, 1, 3).reshape(*x.shape).contiguous()
        output: Tensor = self.out(attended)
        return output


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            Product(width, inner),
            Product(inner, width),
            Product(width, inner),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        output: Tensor = self.w2(gate(self.w1(x)) * self.w3(x))
        return output


def gate(x: Tensor) -> Tensor:
    """SiLU by hand."""
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, inner: int, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.attention = Attention(width, heads, rotation)
        self.feed_forward = FeedForward(width, inner)
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        attended = self.attention(self.norm1(x))
        middle = x + attended
        fed = self.feed_forward(self.norm2(middle))
        output: Tensor = middle + fed
        return output


class Model(nn.Module):
    """The language model."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, inner, layers, heads = SIZES[size]
        self.table = Table(width)
        self.rotation = Rotation(width // heads)
        self.blocks = nn.ModuleList(
            Block(width, inner, heads, self.rotation) for _ in range(layers)
        )
        self.norm = Norm(width)
        self.head = Product(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        output: Tensor = self.head(x)
        return output


def step(size: str, trains: bool, start: Callable[[], None]) -> list[Any]:
    """One pass or step after ``start()``; returns what lives at the end."""
    model = Model(size).to("cuda")
    x = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to("cuda")
    y = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    measure = nn.CrossEntropyLoss()
    start()
    logits = model(x)
    alive = [model, x, y, optimizer, logits]
    if trains:
        loss = measure(logits.view(-1, logits.size(-1)), y.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        alive.append(loss)
    return alive
