"""``flash_attn_2_cuda``, as libraries call it past flash-attn's own functions: xformers does.

Source: csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3, its arguments and results.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.flash_attn import functions, kernels
from pytest_gpumem.simulated.stand_ins.registering import compiled


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any,
) -> list[Tensor]:
    return list(
        kernels.forward(
            *(q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes),
            return_softmax,
        )
    )


def _varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any,
) -> list[Tensor]:
    return list(
        kernels.varlen_forward(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p),
            *(softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax),
            *(block_table, leftpad_k, seqused_k, zero_tensors),
        )
    )


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    generator: Any,
    rng_state: Tensor | None,
) -> list[Tensor]:
    made = _gradients(q, k, v, dq, dk, dv)
    rows = kernels.backward(
        *(dout, q, k, v, out, softmax_lse, *made, dropout_p, softmax_scale, causal, left, right),
        *(softcap, alibi_slopes, deterministic, rng_state),
    )
    return [*made, rows]


def _varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    generator: Any,
    rng_state: Tensor | None,
) -> list[Tensor]:
    made = _gradients(q, k, v, dq, dk, dv)
    rows = kernels.varlen_backward(
        *(dout, q, k, v, out, softmax_lse, *made, cu_seqlens_q, cu_seqlens_k, max_seqlen_q),
        *(max_seqlen_k, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes),
        *(deterministic, rng_state, zero_tensors),
    )
    return [*made, rows]


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.empty_like(of) if each is None else each
        for each, of in zip(given, (q, k, v), strict=True)
    )
    return dq, dk, dv


EXTENSION = SimpleNamespace(
    fwd=compiled(_forward),
    varlen_fwd=compiled(_varlen_forward),
    bwd=compiled(_backward),
    varlen_bwd=compiled(_varlen_backward),
    fwd_kvcache=functions.fwd_kvcache,
)
