"""Models whose memory torch.compile changes in ways of its own: a Llama block, a diffusion U-Net.

Neither is a recording's program; sizes are those of Llama 3 8B and of a small latent diffusion.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LlamaBlock(nn.Module):
    """One layer of Llama 3 8B: grouped attention with rotary positions, gated feed-forward."""

    def __init__(self, width: int = 4096, heads: int = 32, groups: int = 8) -> None:
        super().__init__()
        self.size, inner = width // heads, 14_336
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same."""
        normed = self.norm1(x)
        q, k, v = (
            each(normed).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        q, k = rotated(q), rotated(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


def rotated(x: Tensor) -> Tensor:
    """Rotary positions in float32, as Llama computes them."""
    size = x.shape[-1] // 2
    steps = torch.arange(size, device=x.device, dtype=torch.float32) / size
    positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, 500_000.0**-steps)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


class Residual(nn.Module):
    """Two convolutions with group norms, and the time's embedding between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The block's output."""
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.time(functional.silu(time))[:, :, None, None]
        h = self.conv2(functional.silu(self.norm2(h)))
        result: Tensor = self.skip(x) + h
        return result


class Attended(nn.Module):
    """Self-attention over pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        flat = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (
            each.unflatten(-1, (8, -1)).transpose(1, 2) for each in self.qkv(flat).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        result: Tensor = x + self.out(mixed).transpose(1, 2).reshape(x.shape)
        return result


class DiffusionUNet(nn.Module):
    """Two levels down and up, with attention at the lower one."""

    def __init__(self, channels: int = 4, width: int = 192) -> None:
        super().__init__()
        time, wide = 4 * width, 2 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.width = width
        self.into = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, time) for _ in range(2)])
        self.smaller = nn.Conv2d(width, wide, 3, stride=2, padding=1)
        self.middle = nn.ModuleList([Residual(wide, wide, time) for _ in range(2)])
        self.attended = nn.ModuleList([Attended(wide) for _ in range(2)])
        self.larger = nn.Conv2d(wide, width, 3, padding=1)
        self.up = nn.ModuleList([Residual(2 * width, width, time) for _ in range(3)])
        self.norm = nn.GroupNorm(32, width)
        self.out = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """The noise in ``x`` at ``step``."""
        half = self.width // 2
        rates = torch.exp(-9.2 * torch.arange(half, device=x.device) / half)
        angles = step[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        h = self.into(x)
        kept = [h]
        for block in self.down:
            h = block(h, time)
            kept.append(h)
        h = self.smaller(h)
        for block, attended in zip(self.middle, self.attended, strict=True):
            h = attended(block(h, time))
        h = self.larger(functional.interpolate(h, scale_factor=2.0, mode="nearest"))
        for block in self.up:
            h = block(torch.cat([h, kept.pop()], dim=1), time)
        result: Tensor = self.out(functional.silu(self.norm(h)))
        return result
