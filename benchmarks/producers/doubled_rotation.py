"""A language model whose rotary table holds every frequency twice; a pass without gradients.

Recorded: silmont2000/assignment2-systems 0f94da4e, cs336_systems/benchmark.py (the model is close
to silmont2000/assignment1-basics, read with the frames of the trace), batch 4, 128 tokens, bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH = 10_000, 4, 128
WIDTH, INNER, LAYERS, HEADS = 768, 3072, 12, 12


def matrix(outputs: int, inputs: int) -> nn.Parameter:
    """A weight."""
    return nn.Parameter(torch.empty(outputs, inputs))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``."""
    return torch.einsum("abc,dc->abd", x, weight)


class Norm(nn.Module):
    """Root mean square norm by a product of ``x`` with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = matrix(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight."""
        squares = torch.einsum("abc,abc->ab", x, x)
        squares = squares / WIDTH + 1e-5
        root = torch.sqrt(squares).unsqueeze(-1)
        return x / root * self.weight


class Rotation(nn.Module):
    """Rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.zeros(LENGTH, WIDTH // HEADS), persistent=False)
        self.register_buffer("sin", torch.zeros(LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` rotated."""
        cos = self.cos[positions]
        sin = self.sin[positions]
        return (x * cos) + (turned(x) * sin)


def turned(x: Tensor) -> Tensor:
    """Pairs (a, b) as (-b, a)."""
    x1, x2 = x.view(*x.shape[:-1], -1, 2).unbind(dim=-1)
    both = torch.stack((-x2, x1), dim=-1)
    return both.view(*x.shape)


def softmax(x: Tensor) -> Tensor:
    """By hand."""
    highest = x.max(dim=-1, keepdim=True).values
    above = torch.exp(x - highest)
    below = torch.sum(above, dim=-1, keepdim=True)
    return above / below


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked attention by products."""
    scores = torch.einsum("abcd,abed->abce", q, k)
    scores = scores / q.shape[-1] ** 0.5
    scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712  # the operator is what counts
    weights = softmax(scores)
    return torch.einsum("abcd,abde->abce", weights, v)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.q, self.v, self.out = (matrix(WIDTH, WIDTH) for _ in range(4))
        self.rotation = Rotation()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """The layer's output."""
        q = self._heads(product(x, self.q))
        k = self._heads(product(x, self.k))
        v = self._heads(product(x, self.v))
        q = self.rotation.forward(q, positions)
        k = self.rotation.forward(k, positions)
        length = x.shape[1]
        mask = torch.tril(torch.ones(length, length, device=x.device)).bool()
        attended = attend(q, k, v, mask)
        combined = attended.permute(0, 2, 1, 3).reshape(*x.shape)
        return product(combined, self.out)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], HEADS, -1).permute(0, 2, 1, 3)


class FeedForward(nn.Module):
    """Gated feed-forward, weights on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            matrix(INNER, WIDTH),
            matrix(WIDTH, INNER),
            matrix(INNER, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        first = torch.einsum("ab,cdb->acd", self.w1, x)
        third = torch.einsum("ab,cdb->acd", self.w3, x)
        result = torch.einsum("ab,bcd->cda", self.w2, gate(first) * third)
        return result.to(torch.float32)


def gate(x: Tensor) -> Tensor:
    """SiLU by hand."""
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """The layer's output."""
        normed = self.norm1.forward(x)
        attended = self.attention.forward(normed, positions)
        middle = x + attended
        normed_middle = self.norm2.forward(middle)
        fed = self.feed_forward.forward(normed_middle)
        output: Tensor = middle + fed
        return output


class Model(nn.Module):
    """The language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = matrix(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = matrix(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Logits."""
        x = self.table[tokens]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block.forward(x, positions)
        normed = self.norm(x)
        return {"logits": product(normed, self.head)}


def forward(start: Callable[[], None]) -> list[Any]:
    """A pass after six of them."""
    model = Model().to("cuda")
    data = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to("cuda")
    context = torch.autocast("cuda", dtype=torch.bfloat16)
    for step in range(7):
        if step == 6:
            start()
        _pass(model, data, context)
    return [model, data]


def _pass(model: Model, data: Tensor, context: Any) -> None:
    with context, torch.no_grad():
        _ = model.forward(data)["logits"]
