"""A small decoder-only transformer."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocabulary: int = 4096
    context: int = 512
    width: int = 256
    heads: int = 8
    layers: int = 4


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position to those before it; ``x`` is (batch, positions, width)."""
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.transpose(1, 3).unbind(2)
        attended = attention(query, key, value).transpose(1, 2).flatten(2)
        output: Tensor = self.output(attended)
        return output


class Block(nn.Module):
    """Attention and a perceptron, each with a normalised input and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.before_perceptron = nn.LayerNorm(config.width)
        self.perceptron = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the outputs of both."""
        x = x + self.attention(self.before_attention(x))
        added: Tensor = self.perceptron(self.before_perceptron(x))
        return x + added


class Transformer(nn.Module):
    """A model that predicts the next token at every position."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.before_head = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, positions, vocabulary) of the tokens that come next."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        logits: Tensor = self.head(self.before_head(x))
        return logits


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention; all tensors are (batch, heads, positions, width of a head)."""
    if os.environ.get("EXAMPLE_REGRESSION") == "1":
        return attention_by_hand(query, key, value)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def attention_by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same values, but every score is kept for backward, in float32 too."""
    scores: Tensor = query @ key.mT / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.float().masked_fill(future, float("-inf")).softmax(-1)
    return weights.to(value.dtype) @ value
