"""Attention as xformers and nested tensors call it: (batch, length, heads, size), or sequences of
several lengths one behind the other.

Source: aten/src/ATen/native/transformers/cuda/attention.cu (_flash_attention_forward,
_efficient_attention_forward), attention_backward.cu and flash_attn/flash_api.cpp (mha_varlen_fwd,
mha_varlen_bwd), of torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.raw import META
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import attention
from pytest_gpumem.simulated.operators.rules import Rule, copies_of


def _by_head(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def _flash_outputs(
    gpu: GPU,
    query: Tensor,
    key: Tensor,
    cum_seq_q: Tensor | None,
    dropout_p: float,
    result: tuple[Tensor, ...],
) -> Iterable[Tensor]:
    # out, logsumexp, seed, offset: the last two are CPU tensors up to 2.6.
    sums, state = result[:2], result[2:4] if gpu.version >= (2, 7) else ()
    if cum_seq_q is None:
        given = _by_head(query), _by_head(key)
        return attention.flash_outputs(gpu, *given, dropout_p, sums, state)
    return *sums, *state


def _flash_backward(gpu: GPU, query: Tensor, key: Tensor, cum_seq_q: Tensor | None) -> None:
    if cum_seq_q is None:
        query, key = _by_head(query), _by_head(key)
    attention.flash_backward(gpu, query, key, cum_seq_q)


def _efficient_backward(
    gpu: GPU,
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    lengths = None
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q.numel() - 1, max_seqlen_q, max_seqlen_k
    grad_out_, query, key, value = map(_by_head, (grad_out_, query, key, value))
    attention.efficient_backward(gpu, grad_out_, query, key, value, lengths)


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    bias_requires_grad: bool,
    shared_storage_dqdkdv: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Contiguous ones: torch's shapes leave out an argument (2.13)."""
    if shared_storage_dqdkdv:
        shape = (*query.shape[:-2], 3, *query.shape[-2:])
        made = list(raw.empty(shape, dtype=query.dtype, device=META).unbind(-3))
    else:
        tensors = (query, key, value)
        made = [raw.empty(each.shape, dtype=each.dtype, device=META) for each in tensors]
    by_bias = None
    if bias is not None and bias_requires_grad:
        by_bias = attention.gradient_of_bias(bias)
    return made[0], made[1], made[2], by_bias


RULES = {
    "_flash_attention_forward": Rule(placed=_flash_outputs),
    "_flash_attention_backward": Rule(before=copies_of("grad_out", "out"), after=_flash_backward),
    "_efficient_attention_forward": Rule(
        after=attention.efficient_forward, placed=attention.efficient_outputs
    ),
    "_efficient_attention_backward": Rule(
        before=copies_of("grad_out_"), after=_efficient_backward, shapes=_gradients
    ),
}
