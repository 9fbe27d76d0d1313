"""How queries, keys and values lie in memory, and how one tensor is split into them.

Source: transformer_engine/pytorch/attention/dot_product_attention/utils.py (``get_qkv_layout``)
and pytorch/utils.py (``SplitAlongDim``) of 2.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PACKED, INTERLEAVED = "3hd", "h3d"
"""Queries, keys and values in one tensor, by threes of heads or of each head."""
PAIRED, PAIRED_INTERLEAVED = "hd_2hd", "hd_h2d"
"""Keys and values in one tensor."""
APART = "hd_hd_hd"


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _offsets(*tensors: Tensor) -> list[int]:
    return [int(each.storage_offset()) for each in tensors]


def _layout(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    all_one = _memory(q) == _memory(k) == _memory(v)
    kv_one, qk_one = _memory(k) == _memory(v), _memory(q) == _memory(k)
    size, heads = q.shape[-1], q.shape[-1] * q.shape[-2]
    same = q.shape == k.shape == v.shape and q.stride() == k.stride() == v.stride()
    if all_one and same and _offsets(q, k, v) == [0, heads, 2 * heads]:
        return PACKED
    if all_one and same and _offsets(q, k, v) == [0, size, 2 * size]:
        return INTERLEAVED
    strides = [[step / each.shape[-1] for step in each.stride()[:-1]] for each in (k, v)]
    alike = k.shape[:-1] == v.shape[:-1] and strides[0] == strides[1]
    behind, size = q.numel() if all_one else 0, k.shape[-1]
    if kv_one and alike and _offsets(k, v) == [behind, behind + size * k.shape[-2]]:
        return PAIRED
    if kv_one and alike and _offsets(k, v) == [behind, behind + size]:
        return PAIRED_INTERLEAVED
    counts = q.numel(), k.numel()
    found = (
        _offsets(q, k, v) == ([0, counts[0], sum(counts)] if all_one else [0, 0, 0])
        or _offsets(q, k) == ([0, counts[0]] if qk_one and not all_one else [0, 0])
        or _offsets(k, v) == ([0, counts[1]] if kv_one and not all_one else [0, 0])
    )
    return APART if alike and found else None


def arranged(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, Tensor, Tensor, Tensor]:
    """get_qkv_layout(): how they lie, after copies where they lie as no kernel takes them."""
    if any(each.stride(-1) != 1 for each in (q, k, v)):
        raise AssertionError("q, k and v must have stride 1 in their last dimension!")
    found = _layout(q, k, v)
    if found is None:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        found = _layout(q, k, v)
    if found is None:
        raise RuntimeError("The provided qkv memory layout is not supported!")
    return found, q, k, v


class _Splitting(torch.autograd.Function):
    """SplitAlongDim."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, dim: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Return views."""
        ctx.dim, ctx.sizes = dim, sizes
        parts: tuple[Tensor, ...] = mixed.split(list(sizes), dim)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Join gradients: by their memory where they lie there as the parts do."""
        one, dim = grads[0], ctx.dim % grads[0].dim()
        behind = math.prod(one.shape[dim + 1 :])
        starts = [sum(ctx.sizes[:index]) * behind for index in range(len(grads))]
        shapes = [[*one.shape[:dim], size, *one.shape[dim + 1 :]] for size in ctx.sizes]
        if all(
            each.stride() == one.stride()
            and list(each.shape) == shape
            and _memory(each) == _memory(one)
            and each.storage_offset() == start
            for each, shape, start in zip(grads, shapes, starts, strict=True)
        ):
            joined = one.new()
            shape = [*one.shape[:dim], sum(ctx.sizes), *one.shape[dim + 1 :]]
            joined.set_(one.untyped_storage(), int(one.storage_offset()), shape, one.stride())
            return joined, None, None
        return torch.cat(grads, dim=dim), None, None


split: Callable[..., tuple[Tensor, ...]] = _Splitting.apply
"""SplitAlongDim.apply(tensor, dimension, sizes)."""
