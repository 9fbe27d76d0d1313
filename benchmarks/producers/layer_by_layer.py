"""A language model whose layers visit the GPU one after the other; without gradients.

Recorded: MercuryB1/SQAttn 126d2e68, sparse_quant_attn/compression/entrance.py, which compresses
Qwen2.5-7B with calibration data of 14 x 2048 tokens (torch 2.5): every layer runs once before and
once after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from producers.grouped_heads import repeated, rotate

VOCABULARY, BATCH, LENGTH = 152_064, 14, 2048
WIDTH, INNER, LAYERS = 3584, 18_944, 28
HEADS, KEY_HEADS, HEAD = 28, 4, 128


def weight(*shape: int) -> nn.Parameter:
    """A weight in memory of the host; its values do not matter."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16))


class Product(nn.Module):
    """A linear layer."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs)
        self.bias = weight(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        return F.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """Root mean square norm, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = weight(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight."""
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        output: Tensor = self.weight * x.to(dtype)
        return output


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; tokens before heads."""
    k, v = repeated(k, HEADS // KEY_HEADS), repeated(v, HEADS // KEY_HEADS)
    q = q.contiguous()
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended.transpose(1, 2).contiguous()


class Attention(nn.Module):
    """Grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q = Product(WIDTH, WIDTH, bias=True)
        self.k = Product(WIDTH, KEY_HEADS * HEAD, bias=True)
        self.v = Product(WIDTH, KEY_HEADS * HEAD, bias=True)
        self.out = Product(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The layer's output."""
        split = (*x.shape[:-1], -1, HEAD)
        q = self.q(x).view(split).transpose(1, 2)
        k = self.k(x).view(split).transpose(1, 2)
        v = self.v(x).view(split).transpose(1, 2)
        q, k = rotate(q, k, cos, sin)
        attended = attend(q, k, v)
        attended = attended.reshape(*x.shape[:-1], -1).contiguous()
        output: Tensor = self.out(attended)
        del attended
        return output


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Product(WIDTH, INNER, bias=False)
        self.up = Product(WIDTH, INNER, bias=False)
        self.down = Product(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Layer(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.norm1, self.norm2 = Norm(), Norm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The layer's output."""
        before = x
        x = self.norm1(x)
        x = self.attention(x, cos, sin)
        x = before + x
        before = x
        x = self.norm2(x)
        x = self.feed_forward(x)
        return before + x


def inputs() -> list[Tensor]:
    """The first layer's: embedded tokens, positions, and their table."""
    layer, table = Layer().cuda(), weight(VOCABULARY, WIDTH).data.cuda()
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long).cuda()
    embedded = F.embedding(tokens, table)
    positions = torch.arange(LENGTH, device="cuda").unsqueeze(0)
    frequencies = torch.ones(1, HEAD // 2, 1, device="cuda")
    angles = (frequencies @ positions[:, None].float()).transpose(1, 2)
    both = torch.cat((angles, angles), dim=-1)
    cos, sin = both.cos(), both.sin()
    del layer
    return [embedded, positions, cos.bfloat16(), sin.bfloat16()]


def compress(start: Callable[[], None]) -> list[Any]:
    """All layers, twice each."""
    with torch.no_grad():
        x, positions, cos, sin = inputs()
        torch.cuda.empty_cache()
        start()
        for _ in range(LAYERS):
            layer = Layer().cuda()
            layer(x, cos, sin)
            x = layer(x, cos, sin)
            layer.cpu()
            torch.cuda.empty_cache()
    return [x, positions, cos, sin]
