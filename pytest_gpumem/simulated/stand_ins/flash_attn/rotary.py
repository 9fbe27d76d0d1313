"""Rotary embedding of packed tensors, in their place, and the module that holds the tables.

Source: flash_attn/layers/rotary.py of flash-attn 2.8.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pytest_gpumem.simulated.stand_ins.flash_attn.layers import apply_rotary, apply_rotary_emb

_Offsets = int | Tensor


class _InPlace(torch.autograd.Function):
    """Rotates parts of a packed tensor, and those of its gradient back; keeps only the tables."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        turn: Callable[..., None],
        offsets: _Offsets,
        *tables: Tensor | None,
    ) -> Tensor:
        """Rotate the parts."""
        turn(packed, *tables, offsets=offsets, conjugate=False)
        kept = (offsets,) if isinstance(offsets, Tensor) else ()
        ctx.save_for_backward(*tables, *kept)
        ctx.turn = turn
        ctx.offsets = None if kept else offsets
        ctx.tables = len(tables)
        return packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Rotate the gradient's parts back."""
        saved = ctx.saved_tensors
        tables = saved[: ctx.tables]
        offsets = saved[-1] if ctx.offsets is None else ctx.offsets
        ctx.turn(grads[0], *tables, offsets=offsets, conjugate=True)
        return grads[0], None, None, *(None for _ in tables)


_rotate: Callable[..., Tensor] = _InPlace.apply


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: _Offsets = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate queries and keys of (batch, length, 3, heads, size), or heads one behind the other."""

    def turn(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cos_k: Tensor | None,
        sin_k: Tensor | None,
        *,
        offsets: _Offsets,
        conjugate: bool,
    ) -> None:
        options: Any = {"interleaved": interleaved, "inplace": True, "conjugate": conjugate}
        if qkv.dim() == 5:
            assert qkv.shape[2] == 3
            queries, keys = qkv[:, :, 0], qkv[:, :, 1]
            both = qkv[:, :, :2]
        else:
            assert num_heads_q is not None
            count = (qkv.shape[2] - num_heads_q) // 2
            assert qkv.shape[2] == num_heads_q + 2 * count
            queries, keys, _ = qkv.split((num_heads_q, count, count), 2)
            both = qkv[:, :, : num_heads_q + count]
        if cos_k is None and sin_k is None and qkv.is_contiguous():
            together = both.flatten(2, 3) if qkv.dim() == 5 else both
            apply_rotary(together, cos, sin, offsets, **options)
            return
        apply_rotary(queries, cos, sin, offsets, **options)
        of_keys = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        apply_rotary(keys, *of_keys, offsets, **options)

    return _rotate(qkv, turn, seqlen_offsets, cos, sin, cos_k, sin_k)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: _Offsets = 0,
) -> Tensor:
    """Rotate the keys of (batch, length, 2, heads, size)."""

    def turn(kv: Tensor, cos: Tensor, sin: Tensor, *, offsets: _Offsets, conjugate: bool) -> None:
        assert kv.shape[2] == 2
        apply_rotary(
            kv[:, :, 0], cos, sin, offsets, interleaved=interleaved, inplace=True,
            conjugate=conjugate,
        )  # fmt: skip

    return _rotate(kv, turn, seqlen_offsets, cos, sin)


class RotaryEmbedding(nn.Module):
    """Rotates queries, keys and values by tables that it makes for the longest sequence so far."""

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.interleaved = interleaved
        self.scale_base = scale_base
        scale = None
        if scale_base is not None:
            steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
            scale = (steps + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        made: Tensor = 1.0 / (self.base ** (steps / self.dim))
        return made

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        cos = self._cos_cached
        if (
            seqlen <= self._seq_len_cached
            and cos is not None
            and cos.device == device
            and cos.dtype == dtype
            and not (self.training and cos.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        t = torch.arange(seqlen, device=device, dtype=torch.float32)
        inv_freq = self.inv_freq
        if inv_freq.dtype != torch.float32:
            inv_freq = self._compute_inv_freq(device=device)
        freqs = torch.outer(t, inv_freq)
        if self.scale is None or self.scale_base is None:
            self._cos_cached = torch.cos(freqs).to(dtype)
            self._sin_cached = torch.sin(freqs).to(dtype)
            return
        steps = torch.arange(seqlen, dtype=self.scale.dtype, device=self.scale.device)
        power = (steps - seqlen // 2) / self.scale_base
        scale = self.scale.to(device=power.device) ** power[:, None]
        self._cos_cached = (torch.cos(freqs) * scale).to(dtype)
        self._sin_cached = (torch.sin(freqs) * scale).to(dtype)
        self._cos_k_cached = (torch.cos(freqs) / scale).to(dtype)
        self._sin_k_cached = (torch.sin(freqs) / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: _Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotate ``qkv``, or the queries ``qkv`` and the keys in ``kv``, in their place."""
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        elif isinstance(seqlen_offset, int):
            length = qkv.shape[1] + seqlen_offset
            self._update_cos_sin_cache(length, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        assert cos is not None
        assert sin is not None
        scaled = self.scale is not None
        cos_k, sin_k = (self._cos_k_cached, self._sin_k_cached) if scaled else (None, None)
        options = self.interleaved, seqlen_offset
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, *options, num_heads_q)
        interleaved, offset = options
        q = apply_rotary_emb(qkv, cos, sin, interleaved, inplace=True, seqlen_offsets=offset)
        of_keys = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
        return q, apply_rotary_emb_kv_(kv, *of_keys, *options)
