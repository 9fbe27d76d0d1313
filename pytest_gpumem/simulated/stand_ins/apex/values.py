"""What the norms of apex compute, on the CPU and in float32: for tests that read values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMES = {
    "fused_layer_norm_affine": "layer_norm",
    "fused_layer_norm": "layer_norm_plain",
    "fused_rms_norm_affine": "rms_norm",
    "fused_rms_norm": "rms_norm_plain",
}
"""Operators, without ``_fwd`` and ``_bwd``, and the functions that allocate for them."""


def forward(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """``apex::NAME_fwd``."""
    centered = "layer" in name

    def compute(input: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *weights, shape, eps = rest[:-1] if isinstance(rest[-1], bool) else rest
        rows = _rows(input, shape)
        mean = rows.mean(1) if centered else rows.new_zeros(rows.shape[0])
        inverse = torch.rsqrt((rows - mean[:, None]).square().mean(1) + eps)
        out = ((rows - mean[:, None]) * inverse[:, None]).view(input.shape)
        if weights:
            out = out * weights[0].float()
        for bias in weights[1:]:
            out = out + bias.float()
        sums = (mean, inverse) if centered else (inverse,)
        return out.to(input.dtype), *sums

    return compute


def backward(name: str) -> Callable[..., Any]:
    """``apex::NAME_bwd``."""
    centered = "layer" in name

    def compute(grad: Tensor, *rest: Any) -> Any:
        sums, (kept, shape, *weights) = rest[: 1 + centered], rest[1 + centered :]
        if isinstance(weights[-1], bool) and weights.pop():
            raise NotImplementedError("what was kept is the output")
        *tensors, _eps = weights
        rows, inverse = _rows(kept, shape), sums[-1][:, None]
        normal = (rows - sums[0][:, None] if centered else rows) * inverse
        wide = _rows(grad, shape)
        inner = wide * tensors[0].float().flatten() if tensors else wide
        back = inner - normal * (inner * normal).mean(1, keepdim=True)
        if centered:
            back = back - inner.mean(1, keepdim=True)
        found = back * inverse, (wide * normal).sum(0), wide.sum(0)
        made = tuple(
            each.view(like.shape).to(like.dtype)
            for each, like in zip(found, (kept, *tensors), strict=False)
        )
        return made if len(made) > 1 else made[0]

    return compute


def _rows(input: Tensor, shape: Sequence[int]) -> Tensor:
    return input.float().reshape(input.shape[: input.dim() - len(shape)].numel(), -1)


def manual_rms_norm(
    input: Tensor, shape: Sequence[int], weights: Sequence[Tensor], eps: float
) -> Tensor:
    """What the library computes of tensors on the CPU."""
    dims = tuple(range(-len(shape), 0))
    variance = input.to(torch.float32).pow(2).mean(dims, keepdim=True)
    out = input * torch.rsqrt(variance + eps)
    for weight in weights:
        out = weight * (out.to(weight.dtype) if weight.dtype != torch.float32 else out)
    return out
