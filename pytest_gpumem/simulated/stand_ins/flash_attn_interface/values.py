"""What flash-attn 3 computes, on the CPU and in float32: the same as flash-attn 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.flash_attn import values

_PLAIN = {"rotary_interleaved", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"}
"""What changes how attention is computed, and not what."""


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    """``flash_attn_3::_flash_attn_forward``."""
    given = _named(_FORWARD, rest, options)
    starts = given.pop("cu_seqlens_q", None), given.pop("cu_seqlens_k", None)
    longest = given.pop("max_seqlen_q", None), given.pop("max_seqlen_k", None)
    call = _call(q, given)
    if starts[0] is None:
        out, lse, _, _ = values.forward(q, k, v, *call)
    else:
        out, lse, _, _ = values.varlen_forward(q, k, v, *starts, *longest, *call)
    return out, lse, torch.zeros(0), torch.zeros(0)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    *rest: Any,
    **options: Any,
) -> Tensor:
    """``flash_attn_3::_flash_attn_backward``; gradients go into ``dq``, ``dk``, ``dv``."""
    given = _named(_BACKWARD, rest, options)
    starts = given.pop("cu_seqlens_q", None), given.pop("cu_seqlens_k", None)
    longest = given.pop("max_seqlen_q", None), given.pop("max_seqlen_k", None)
    into = [given.pop(name) for name in ("dq", "dk", "dv")]
    given.pop("deterministic", None)
    given["causal"] = given.pop("is_causal", False)
    call = _call(q, given)
    tensors = dout, q, k, v, out, softmax_lse, *into
    if starts[0] is None:
        return values.backward(*tensors, *call)
    return values.varlen_backward(*tensors, *starts, *longest, *call)


_FORWARD = (
    "k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
    "seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left "
    "window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata num_splits "
    "pack_gqa sm_margin"
).split()
_BACKWARD = (
    "cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q max_seqlen_k dq dk dv "
    "softmax_scale is_causal window_size_left window_size_right softcap deterministic sm_margin"
).split()


def _named(names: list[str], rest: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, rest, strict=False)), **options}


def _call(q: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
    """What flash-attn 2 takes: no dropout, scale, causal, window and softcap."""
    scale = given.pop("softmax_scale", None)
    made = (
        *(0.0, q.shape[-1] ** -0.5 if scale is None else scale, given.pop("causal", False)),
        *(given.pop("window_size_left", -1), given.pop("window_size_right", -1)),
        given.pop("softcap", 0.0),
    )
    others = sorted(name for name, value in given.items() if value and name not in _PLAIN)
    if others:
        raise NotImplementedError(", ".join(others))
    return made
