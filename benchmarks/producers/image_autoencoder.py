"""The autoencoder of Qwen-Image, one image at a time: invoke-ai/InvokeAI#9305, pytorch#177406.

AutoencoderKLQwenImage of diffusers, from before its norm computed halves in float32. Convolutions
are causal in time and keep what came in for the next frame until the image is done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS = 96
LATENT = 16
_FACTORS = (1, 2, 4, 4)

Kept = list[Tensor]
"""What convolutions keep of a frame."""


class _CausalConv(nn.Conv3d):
    """Padded with two earlier frames of zeros."""

    def __init__(self, inputs: int, outputs: int, kernel: Any, padding: int = 0) -> None:
        super().__init__(inputs, outputs, kernel)
        self.sides = (padding, padding, padding, padding, 2 * padding, 0)

    def forward(self, x: Tensor, kept: Kept | None = None) -> Tensor:
        if kept is not None:
            kept.append(x.clone())
        x = functional.pad(x, self.sides)
        return super().forward(x)


class _Norm(nn.Module):
    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.scale = channels**0.5
        self.gamma = nn.Parameter(torch.ones(channels, *[1] * dims))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = functional.normalize(x, dim=1) * self.scale * self.gamma + 0.0
        return normed


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = _Norm(inputs, 3)
        self.conv1 = _CausalConv(inputs, outputs, 3, 1)
        self.norm2 = _Norm(outputs, 3)
        self.conv2 = _CausalConv(outputs, outputs, 3, 1)
        self.shortcut = _CausalConv(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        shortcut: Tensor = self.shortcut(x)
        x = self.norm1(x)
        x = functional.silu(x)
        x = self.conv1(x, kept)
        x = self.norm2(x)
        x = functional.silu(x)
        x = self.conv2(x, kept)
        return x + shortcut


class _Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _Norm(channels, 2)
        self.to_qkv = nn.Conv2d(channels, channels * 3, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        came = x
        batch, channels, time, height, width = x.shape
        x = x.permute(0, 2, 1, 3, 4).reshape(batch * time, channels, height, width)
        x = self.norm(x)
        qkv = self.to_qkv(x)
        qkv = qkv.reshape(batch * time, 1, channels * 3, -1)
        qkv = qkv.permute(0, 1, 3, 2).contiguous()
        query, key, value = qkv.chunk(3, dim=-1)
        x = functional.scaled_dot_product_attention(query, key, value)
        x = x.squeeze(1).permute(0, 2, 1).reshape(batch * time, channels, height, width)
        x = self.proj(x)
        x = x.view(batch, time, channels, height, width).permute(0, 2, 1, 3, 4)
        return x + came


class _Upsample(nn.Upsample):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


class _Resample(nn.Module):
    """To twice or half the size; ``timed`` ones have weights for later frames, and may keep."""

    def __init__(self, channels: int, up: bool, timed: bool) -> None:
        super().__init__()
        if up:
            layers = [
                _Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact"),
                nn.Conv2d(channels, channels // 2, 3, padding=1),
            ]
        else:
            layers = [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(channels, channels, 3, stride=2)]
        self.resample = nn.Sequential(*layers)
        self.keeps = timed and not up
        if timed:
            self.time_conv = _CausalConv(channels, channels * 2 if up else channels, (3, 1, 1))

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        batch, channels, time, height, width = x.shape
        x = x.permute(0, 2, 1, 3, 4).reshape(batch * time, channels, height, width)
        x = self.resample(x)
        x = x.view(batch, time, *x.shape[1:]).permute(0, 2, 1, 3, 4)
        if self.keeps:
            kept.append(x.clone())
        return x


class _Stage(nn.Module):
    """Blocks in a row; what came in lives until the last is done."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        for block in self.blocks:
            x = block(x, kept)
        return x


class _Half(nn.Module):
    """The encoder or the decoder."""

    def __init__(self, ins: int, first: int, blocks: list[nn.Module], last: int, out: int) -> None:
        super().__init__()
        self.conv_in = _CausalConv(ins, first, 3, 1)
        self.blocks = nn.ModuleList(blocks)
        self.norm_out = _Norm(last, 3)
        self.conv_out = _CausalConv(last, out, 3, 1)

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        x = self.conv_in(x, kept)
        for block in self.blocks:
            x = block(x, kept)
        x = self.norm_out(x)
        x = functional.silu(x)
        result: Tensor = self.conv_out(x, kept)
        return result


def _middle(channels: int) -> _Stage:
    first, last = (_Residual(channels, channels) for _ in range(2))
    return _Stage(first, _Attention(channels), last)


def _encoder() -> _Half:
    blocks: list[nn.Module] = []
    inputs = CHANNELS
    for stage, factor in enumerate(_FACTORS):
        channels = CHANNELS * factor
        blocks += [_Residual(inputs, channels), _Residual(channels, channels)]
        if stage < 3:
            blocks.append(_Resample(channels, up=False, timed=stage > 0))
        inputs = channels
    return _Half(3, CHANNELS, [*blocks, _middle(inputs)], inputs, 2 * LATENT)


def _decoder() -> _Half:
    inputs = CHANNELS * _FACTORS[-1]
    blocks: list[nn.Module] = [_middle(inputs)]
    for stage, factor in enumerate(reversed(_FACTORS)):
        channels = CHANNELS * factor
        parts: list[nn.Module] = [_Residual(inputs, channels)]
        parts += [_Residual(channels, channels) for _ in range(2)]
        if stage < 3:
            parts.append(_Resample(channels, up=True, timed=stage < 2))
        blocks.append(_Stage(*parts))
        inputs = channels // 2
    return _Half(LATENT, CHANNELS * _FACTORS[-1], blocks, CHANNELS, 3)


class Autoencoder(nn.Module):
    """Images of shape (1, 3, 1, height, width), latents of (1, 16, 1, height / 8, width / 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()
        self.quant_conv = _CausalConv(2 * LATENT, 2 * LATENT, 1)
        self.post_quant_conv = _CausalConv(LATENT, LATENT, 1)
        self.decoder = _decoder()

    def encode(self, image: Tensor) -> Tensor:
        """The moments of the latents."""
        kept: Kept = []
        encoded = self.encoder(image, kept)
        result: Tensor = self.quant_conv(encoded)
        return result

    def decode(self, latents: Tensor) -> Tensor:
        """The image."""
        kept: Kept = []
        latents = self.post_quant_conv(latents)
        image = self.decoder(latents, kept)
        return torch.clamp(image, min=-1.0, max=1.0)
