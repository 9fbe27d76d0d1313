"""Attention that other operators than ``scaled_dot_product_attention`` call.

The fast path of nn.TransformerEncoderLayer and nn.MultiheadAttention without gradients: where flash
or the memory-efficient kernel can run, without a mask, and no weights are wanted, it is made of
ordinary operators; else it has kernels of its own (masked_softmax of attention.cpp). xformers and
nested tensors call the kernels with (batch, length, heads, size), or with concatenated sequences of
several lengths.

Source: aten/src/ATen/native/transformers/cuda/attention.cu (native_multi_head_attention_cuda,
_flash_attention_forward, _efficient_attention_forward), attention_backward.cu and
flash_attn/flash_api.cpp (mha_varlen_fwd, mha_varlen_bwd), of torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.raw import META
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import attention
from pytest_gpumem.simulated.operators.attention_choice import EFFICIENT, FLASH, AttentionCall
from pytest_gpumem.simulated.operators.rules import Composite, Rule, copies_of


def is_followed(tokens: Tensor) -> bool:
    """Return whether self-attention of ``tokens`` (batch, length, width) is followed."""
    return tokens.dim() == 3 and tokens.numel() > 0 and tokens.is_contiguous()


_PADDED_SINCE = (2, 12)
"""First release whose fused kernels take heads of any size (tried on 2.11 and 2.13)."""


def _by_head(tokens: Tensor, heads: int) -> Tensor:
    batch, length, width = tokens.shape
    return tokens.view(batch, length, heads, width // heads).transpose(1, 2)


def _attention(
    gpu: GPU,
    query: Tensor,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None,
    need_weights: bool,
    average_attn_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    is_fused = False
    is_padded = gpu.version < _PADDED_SINCE and query.shape[-1] // num_head % 8
    if not (need_weights or mask is not None or is_padded):
        by_head = _by_head(query, num_head)
        is_fused = AttentionCall(gpu, by_head, by_head, by_head).kernel() in (FLASH, EFFICIENT)
    if not is_fused:
        projection, kept = (proj_weight, proj_bias), (need_weights, average_attn_weights)
        return _by_own_kernels(gpu, query, num_head, qkv_weight, projection, mask, kept)
    projected = functional.linear(query, qkv_weight, qkv_bias)
    q, k, v = (_by_head(chunk, num_head) for chunk in projected.chunk(3, -1))
    attended = functional.scaled_dot_product_attention(q, k, v)
    merged = attended.transpose(1, 2).reshape(query.shape)
    result = functional.linear(merged, proj_weight, proj_bias)
    del merged, attended, q, k, v, projected
    return result, None


def _by_own_kernels(
    gpu: GPU,
    query: Tensor,
    heads: int,
    qkv_weight: Tensor,
    projection: tuple[Tensor, Tensor],
    mask: Tensor | None,
    kept: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None]:
    """Attend with the softmax in place, unless masked, and the context where the queries were.

    ``kept``: whether the result has attention's weights, of each head or their mean.
    """
    batch, length, width = query.shape
    projected = torch.matmul(query, qkv_weight.t())
    packed = query.new_empty((3, batch * heads, length, width // heads))
    del projected
    scores: Tensor | None = torch.bmm(packed[0], packed[1].transpose(1, 2))
    if mask is not None:
        flags = mask.bool()
        scores = query.new_empty((batch * heads, length, length))
        del flags
    gpu.workspaces.gemm(gpu.stream)
    if not kept[0]:
        scores = None
    context = query.new_empty(query.shape)
    result = functional.linear(context, *projection)
    del context
    if scores is not None:
        scores = scores.view(batch, heads, length, length)
        if kept[1]:
            scores = scores.sum(1)
            scores.div_(heads)
    del packed
    return result, scores


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def _flash_outputs(
    gpu: GPU,
    query: Tensor,
    key: Tensor,
    cum_seq_q: Tensor | None,
    dropout_p: float,
    result: tuple[Tensor, ...],
) -> Iterator[Tensor]:
    if gpu.model.compute_capability < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    # out, logsumexp, seed, offset: the last two are CPU tensors up to 2.6.
    sums, state = result[:2], result[2:4] if gpu.version >= (2, 7) else ()
    if cum_seq_q is None:
        given = _heads_first(query), _heads_first(key)
        yield from attention.flash_outputs(gpu, *given, dropout_p, sums, state)
        return
    yield from sums
    yield from attention.generator_state(gpu, dropout_p, state)


def _flash_backward(gpu: GPU, query: Tensor, key: Tensor, cum_seq_q: Tensor | None) -> None:
    if cum_seq_q is None:
        query, key = _heads_first(query), _heads_first(key)
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
    dropout_p: float,
) -> None:
    lengths = None
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q.numel() - 1, max_seqlen_q, max_seqlen_k
    grad_out_, query, key, value = map(_heads_first, (grad_out_, query, key, value))
    attention.efficient_backward(gpu, grad_out_, query, key, value, dropout_p, lengths)


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    bias_requires_grad: bool,
    shared_storage_dqdkdv: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return contiguous gradients: torch's shape function lacks an argument (2.13)."""
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


BELOW_AUTOGRAD: dict[str, Composite] = {
    "aten._native_multi_head_attention.default": _attention,
}

RULES = {
    "_flash_attention_forward": Rule(outputs=_flash_outputs),
    "_flash_attention_backward": Rule(before=copies_of("grad_out", "out"), after=_flash_backward),
    "_efficient_attention_forward": Rule(
        after=attention.efficient_forward, outputs=attention.efficient_outputs
    ),
    "_efficient_attention_backward": Rule(
        before=copies_of("grad_out_"), after=_efficient_backward, shapes=_gradients
    ),
}
