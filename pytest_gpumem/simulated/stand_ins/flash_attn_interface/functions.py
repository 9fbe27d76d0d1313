"""The functions of flash-attn 3 and what autograd keeps of them.

Source: hopper/flash_attn_interface.py of flash-attn 3.0.0 (hopper/, July 2026).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.flash_attn_interface.kernels import OPERATORS, forward
from pytest_gpumem.simulated.stand_ins.registering import compiled

Window = tuple[int, int]
EVERYTHING: Window = (-1, -1)

_with_cache = compiled(forward)


class FlashAttention(torch.autograd.Function):
    """FlashAttnFunc, FlashAttnVarlenFunc and FlashAttnQKVPackedFunc.

    ``lengths`` are cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k and the longest of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        heads: int | None,
        lengths: tuple[Any, ...],
        options: dict[str, Any],
        deterministic: bool,
        probabilities: bool,
        qv: Tensor | None,
        *tensors: Tensor,
    ) -> Any:
        """Attend; keep inputs, out and softmax_lse."""
        q, k, v = _parts(tensors, heads)
        starts_q, starts_k, used_q, used_k, *longest = lengths
        out, lse, *parts = OPERATORS["_flash_attn_forward"](
            q,
            k,
            v,
            qv=qv,
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
            seqused_q=used_q,
            seqused_k=used_k,
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            **options,
        )
        del parts
        ctx.save_for_backward(q, k, v, out, lse, *lengths[:4])
        ctx.longest, ctx.options = longest, options
        ctx.deterministic, ctx.packed = deterministic, tensors[0].dim() if len(tensors) == 1 else 0
        return (out, lse) if probabilities else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        """Make gradients, stacked ones as one tensor."""
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        chunk = ctx.options["attention_chunk"]
        assert chunk == 0, "FA3 backward does not support attention_chunk"
        together = None
        if ctx.packed == 5:
            together = q.new_empty((*q.shape[:-2], 3, *q.shape[-2:]))
            dq, dk, dv = together.unbind(-3)
        elif ctx.packed:
            counts = q.shape[2], k.shape[2], k.shape[2]
            together = q.new_empty((*q.shape[:-2], sum(counts), q.shape[-1]))
            dq, dk, dv = together.split(counts, -2)
        else:
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = ctx.options
        OPERATORS["_flash_attn_backward"](
            *(dout, q, k, v, out, lse, *lengths, *ctx.longest, dq, dk, dv),
            *(options["softmax_scale"], options["causal"], options["window_size_left"]),
            *(options["window_size_right"], options["softcap"], ctx.deterministic),
            options["sm_margin"],
        )
        made = (dq, dk, dv) if together is None else (together,)
        return None, None, None, None, None, None, *made


def _parts(tensors: tuple[Tensor, ...], heads: int | None) -> tuple[Tensor, ...]:
    if len(tensors) == 3:
        return tensors
    (packed,) = tensors
    if packed.dim() == 5:
        assert packed.shape[-3] == 3
        return packed.detach().unbind(-3)
    assert heads is not None
    keys = (packed.shape[2] - heads) // 2
    assert keys * 2 + heads == packed.shape[2]
    return torch.split(packed.detach(), [heads, keys, keys], -2)


_apply: Callable[..., Any] = FlashAttention.apply
_NO_LENGTHS = (None,) * 6


def _options(
    q: Tensor,
    qv: Tensor | None,
    softmax_scale: float | None,
    window: Window,
    **others: Any,
) -> dict[str, Any]:
    if softmax_scale is None:
        softmax_scale = (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5
    return {
        "softmax_scale": softmax_scale,
        "window_size_left": window[0],
        "window_size_right": window[1],
        **others,
    }


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend: (batch, length, heads, size), keys and values with as many heads or fewer."""
    options = _options(
        q,
        qv,
        softmax_scale,
        window_size,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    return _apply(None, _NO_LENGTHS, options, deterministic, return_attn_probs, qv, q, k, v)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend: (all lengths together, heads, size)."""
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    options = _options(
        q,
        qv,
        softmax_scale,
        window_size,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    return _apply(None, lengths, options, deterministic, return_attn_probs, qv, q, k, v)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend: (batch, length, 3, heads, size), or heads one behind the other."""
    options = _options(
        qkv,
        None,
        softmax_scale,
        window_size,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        softcap=softcap,
        sm_margin=sm_margin,
    )
    return _apply(num_heads_q, _NO_LENGTHS, options, deterministic, return_attn_probs, None, qkv)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attend to a cache, which takes new keys and values in place."""
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full(
            (q.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device
        )
    if k is not None and cache_seqlens is None:
        raise RuntimeError("If k_new is supplied, seqlens_k must also be passed in")
    options = _options(
        q,
        qv,
        softmax_scale,
        window_size,
        causal=causal,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        sm_margin=sm_margin,
        scheduler_metadata=scheduler_metadata,
    )
    out, lse, *parts = _with_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=cache_seqlens,
        max_seqlen_q=max_seqlen_q,
        page_table=page_table,
        kv_batch_idx=cache_batch_idx,
        leftpad_k=cache_leftpad,
        **options,
    )
    return (out, lse, *parts) if return_softmax_lse else out
