"""Fused attention, computed on the CPU; packed sequences are concatenated.

Backward repeats the dropout of forward by its seed, which is among the results, as on CUDA.

Source: aten/src/ATen/native/transformers/attention.cpp (_scaled_dot_product_attention_math),
cuda/attention.cu (_flash_attention_forward, _efficient_attention_forward) and attention_backward.cu
of torch 2.6 to 2.15. Windows, slopes and pages of keys are not computed: their results are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.signatures import UNREAD

_FROM_TOP_LEFT, _FROM_BOTTOM_RIGHT = 1, 2
"""``custom_mask_type``; flash attention of packed sequences has only the second."""


def _probabilities(
    query: Tensor, key: Tensor, bias: Tensor | None, mask: int, dropout: float, factor: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return probabilities, the same after dropout, and the logarithm of each row's sum."""
    scores = query.float() @ key.float().transpose(-2, -1) * factor
    if bias is not None:
        scores += bias
    if mask:
        rows, columns = scores.shape[-2:]
        diagonal = 1 + (columns - rows if mask == _FROM_BOTTOM_RIGHT else 0)
        scores += torch.full((rows, columns), -math.inf, device="cpu").triu(diagonal)
    total = scores.logsumexp(-1)
    # A row that sees nothing attends to nothing.
    weights = (scores - total[..., None]).exp_().nan_to_num_(0.0)
    if not dropout:
        return weights, weights, total
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(weights.shape, generator=generator, device="cpu") >= dropout
    return weights, weights * kept / (1 - dropout), total


def _wide(tensor: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with as many heads as ``query`` has."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(groups, 1) if groups > 1 else tensor


def _factor(query: Tensor, scale: float | None) -> float:
    return scale if scale is not None else 1 / math.sqrt(query.shape[-1])


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: int, dropout: float,
    scale: float | None, seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output, and the logarithm of each row's sum."""
    given = query, _wide(key, query), bias, mask, dropout, _factor(query, scale), seed
    _, dropped, total = _probabilities(*given)
    return (dropped @ _wide(value, query).float()).to(query.dtype), total


def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: int,
    dropout: float, scale: float | None, seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients by queries, keys, values and bias."""
    chosen, factor = int(seed.flatten()[0]) if dropout else 0, _factor(query, scale)
    wide_key, gradient = _wide(key, query), gradient.float()
    weights, dropped, _ = _probabilities(query, wide_key, bias, mask, dropout, factor, chosen)
    by_weight = dropped * (gradient @ _wide(value, query).float().transpose(-2, -1))
    scores = by_weight - weights * by_weight.sum(-1, keepdim=True)
    by_query = scores @ wide_key.float() * factor
    by_key = scores.transpose(-2, -1) @ query.float() * factor
    by_value = dropped.transpose(-2, -1) @ gradient
    by_key, by_value = (each.unflatten(1, (key.shape[1], -1)).sum(2) for each in (by_key, by_value))
    by_bias = scores if bias is None else scores.to(bias.dtype)
    return by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype), by_bias


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float,
    is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """Return the output, the logarithm of each row's sum, and the dropout's seed."""
    seed = int(torch.randint(2**31, (), device="cpu")) if dropout else 0
    mask = _FROM_TOP_LEFT if is_causal else 0
    return *_attention(query, key, value, bias, mask, dropout, scale, seed), seed


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    attn_bias: Tensor | None = None,
) -> Any:
    out, total, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    return out, total[..., None], None, None, None, None, seed, UNREAD, UNREAD


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    out, total, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    padded = F.pad(total, (0, -total.shape[-1] % 32), value=math.inf)
    return out, padded if compute_log_sumexp else UNREAD, seed, UNREAD


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    philox_seed: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    attn_bias: Tensor | None = None,
    grad_out: Tensor | None = None,
    grad_out_: Tensor | None = None,
) -> Any:
    gradient = grad_out_ if grad_out is None else grad_out
    assert gradient is not None
    mask = _FROM_TOP_LEFT if is_causal else 0
    given = query, key, value, attn_bias, mask, dropout_p, scale, philox_seed
    found = _gradients(gradient, *given)
    return found if grad_out is None else found[:3]


# Packed sequences, and attention as xformers calls it: (batch, positions, heads, head size).

Bias = Callable[[int, Tensor, Tensor], Tensor | None]
"""(index of the sequence, its queries, its keys) -> what is added to scores."""


def packed_forward(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[Tensor | None, Tensor | None],
    dropout: float, mask: int, scale: float | None, bias: Bias,
) -> tuple[Tensor, list[Tensor], int]:  # fmt: skip
    """Return the output, the logarithm of each row's sum by sequence, and the dropout's seed."""
    seed = int(torch.randint(2**31, (), device="cpu")) if dropout else 0
    out = torch.zeros_like(query[..., :1]).expand(*query.shape[:-1], value.shape[-1]).clone()
    totals = []
    for at, (q, k, v, o) in enumerate(_sequences(lengths, query, key, value, out)):
        computed, total = _attention(q, k, v, bias(at, q, k), mask, dropout, scale, seed)
        o.copy_(computed)
        totals.append(total)
    return out, totals, seed


def packed_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor,
    lengths: tuple[Tensor | None, Tensor | None], seed: Tensor, dropout: float, mask: int,
    scale: float | None, bias: Bias,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients by queries, keys and values, and the last sequence's by its bias."""
    results = [torch.zeros_like(one) for one in (query, key, value)]
    by_bias: Any = UNREAD
    parts = _sequences(lengths, query, key, value, results[0], results[1], results[2], gradient)
    for at, (q, k, v, by_q, by_k, by_v, g) in enumerate(parts):
        *found, by_bias = _gradients(g, q, k, v, bias(at, q, k), mask, dropout, scale, seed)
        for target, computed in zip((by_q, by_k, by_v), found, strict=True):
            target.copy_(computed)
    return results[0], results[1], results[2], by_bias


def _sequences(
    lengths: tuple[Tensor | None, Tensor | None], *tensors: Tensor
) -> Iterator[list[Tensor]]:
    """Yield, by sequence, views of all tensors: (batch, heads, positions, head size)."""
    by_query, by_key = lengths
    if by_query is None or by_key is None:
        yield [tensor.transpose(1, 2) for tensor in tensors]
        return
    packed = [tensor.squeeze(0) if tensor.dim() == 4 else tensor for tensor in tensors]
    query_ranges, key_ranges = pairwise(by_query.tolist()), pairwise(by_key.tolist())
    for query, key in zip(query_ranges, key_ranges, strict=True):
        yield [
            tensor[slice(*(key if at in _OF_KEYS[len(tensors)] else query))].transpose(0, 1)[None]
            for at, tensor in enumerate(packed)
        ]


_OF_KEYS = {4: (1, 2), 7: (1, 2, 4, 5)}
"""Positions of the tensors of a forward or a backward that have the keys' lengths."""


def _refuse_given(**unknown: Any) -> None:
    for name, value in unknown.items():
        if value is not None and value not in (-1, False):
            raise NotImplementedError(name)


def _packed_flash(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: float | None = None, num_splits: int | None = None, **others: Any,
) -> Any:  # fmt: skip
    _refuse_given(debug_mask=return_debug_mask or None, **others)
    mask = _FROM_BOTTOM_RIGHT if is_causal else 0
    lengths = cum_seq_q, cum_seq_k
    given = query, key, value, lengths, dropout_p, mask, scale
    out, totals, seed = packed_forward(*given, lambda *_: None)
    if cum_seq_q is None:
        total = totals[0]
    elif _pads_sums():
        total = torch.cat([F.pad(one, (0, max_q - one.shape[-1])) for one in totals])
    else:
        total = torch.cat([one[0] for one in totals], -1)
    return out, total, seed, UNREAD, UNREAD


@cache
def _pads_sums() -> bool:
    """Return whether each sequence has a row of sums, padded to the length of the longest.

    In 2.6 it has; in 2.13 one row has those of all sequences. The ``meta`` kernel shows which.
    """
    query = raw.empty((1, 1, 8), dtype=torch.bfloat16, device=raw.META)
    ends = raw.empty(2, dtype=torch.int32, device=raw.META)
    given = query, query, query, ends, ends, 1, 1, 0.0, False, False
    return bool(torch.ops.aten._flash_attention_forward(*given)[1].dim() == 3)


def _packed_flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    **others: Any,
) -> Any:  # fmt: skip
    _refuse_given(**others)
    mask = _FROM_BOTTOM_RIGHT if is_causal else 0
    lengths = cum_seq_q, cum_seq_k
    given = query, key, value, lengths, rng_state, dropout_p, mask, scale
    return packed_backward(grad_out, *given, lambda *_: None)[:3]


def _packed_efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None,
    dropout_p: float, custom_mask_type: int, compute_log_sumexp: bool = False, *,
    scale: float | None = None, **others: Any,
) -> Any:  # fmt: skip
    _refuse_given(bias=None if cu_seqlens_q is None else bias, **others)
    lengths = cu_seqlens_q, cu_seqlens_k
    out, totals, seed = packed_forward(
        query, key, value, lengths, dropout_p, custom_mask_type, scale, lambda *_: bias
    )
    longest = (query.shape[1], key.shape[1])
    if cu_seqlens_q is not None:
        longest = max_seqlen_q or longest[0], max_seqlen_k or longest[1]
    rows = -(-longest[0] // 32) * 32
    padded = [F.pad(t, (0, rows - t.shape[-1]), value=math.inf) for t in totals]
    total = torch.cat(padded) if compute_log_sumexp else UNREAD
    return out, total, seed, UNREAD, *longest


def _packed_efficient_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    logsumexp: Tensor, dropout_p: float, philox_seed: Tensor, philox_offset: Tensor,
    custom_mask_type: int, bias_requires_grad: bool, *, scale: float | None = None,
    num_splits_key: int | None = None, shared_storage_dqdkdv: bool = False, **others: Any,
) -> Any:  # fmt: skip
    _refuse_given(bias=None if cu_seqlens_q is None else bias, **others)
    lengths = cu_seqlens_q, cu_seqlens_k
    given = query, key, value, lengths, philox_seed, dropout_p, custom_mask_type, scale
    *gradients, by_bias = packed_backward(grad_out_, *given, lambda *_: bias)
    return *gradients, by_bias if bias_requires_grad else UNREAD


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention": _fused,
    "aten::_scaled_dot_product_flash_attention_backward": _backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _backward,
    "aten::_scaled_dot_product_cudnn_attention": _fused,
    "aten::_scaled_dot_product_cudnn_attention_backward": _backward,
    "aten::_flash_attention_forward": _packed_flash,
    "aten::_flash_attention_backward": _packed_flash_backward,
    "aten::_efficient_attention_forward": _packed_efficient,
    "aten::_efficient_attention_backward": _packed_efficient_backward,
}
"""By operator name."""
