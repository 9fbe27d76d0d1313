"""Operators that only CUDA has a kernel for, computed on the CPU from others.

Each takes the operator's arguments and returns its results; ``UNREAD`` stands for one that no
formula reads, an integer for a tensor that is filled with it. Random choices of a forward kernel
are remembered as on CUDA, where a seed is among its results.

Source: aten/src/ATen/native/transformers/attention.cpp (_scaled_dot_product_attention_math),
native/cudnn/BatchNorm.cpp, of torch 2.6 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.real import convolutions as real_convolutions
from pytest_gpumem.simulated.machine.real import counting as real_counting
from pytest_gpumem.simulated.machine.real import embeddings as real_embeddings
from pytest_gpumem.simulated.machine.real import recurrent
from pytest_gpumem.simulated.machine.real import sync_batch_norm as real_sync_batch_norm
from pytest_gpumem.simulated.machine.real.differentiated import UNREAD, leaf, with_autograd

_aten = torch.ops.aten
_HALVES = frozenset({torch.float16, torch.bfloat16})


def in_float32(
    compute: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], *, writes: bool
) -> Any:
    """Compute in float32 if the CPU has no half-precision kernel."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widened(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in _HALVES:
            pairs.append((value, value.float()))
            return pairs[-1][1]
        if isinstance(value, (list, tuple)):
            return type(value)([widened(item) for item in value])
        return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value

    wide = [widened(value) for value in args]
    computed = compute(*wide, **{name: widened(value) for name, value in kwargs.items()})
    if writes:
        for narrow, result in pairs:
            narrow.copy_(result)
    return () if computed is None else computed


# Attention.


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return probabilities, the same after dropout, log-sum-exp, values and the scale."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    scores = query.float() @ key.float().transpose(-2, -1) * factor
    if bias is not None:
        scores += bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").tril().logical_not_()
        scores.masked_fill_(hidden, -math.inf)
    total = scores.logsumexp(-1)
    # A row that sees nothing attends to nothing.
    weights = (scores - total[..., None]).exp_().nan_to_num_(0.0)
    dropped = weights
    if dropout:
        generator = torch.Generator().manual_seed(seed)
        kept = torch.rand(weights.shape, generator=generator, device="cpu") >= dropout
        dropped = weights * kept / (1 - dropout)
    return weights, dropped, total, value.float(), factor


def seed_for(dropout: float) -> int:
    """Draw a seed for dropout; 0 without dropout."""
    return int(torch.randint(2**31, (), device="cpu")) if dropout else 0


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, int]:
    """Return the output, the logarithm of each row's sum, and the dropout's seed."""
    seed = seed_for(dropout)
    _, dropped, total, values, _ = attention(
        query, key, value, bias, dropout, is_causal, scale, seed
    )
    return (dropped @ values).to(query.dtype), total, seed


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, total, seed = _forward(query, key, value, None, dropout_p, is_causal, scale)
    return out, total, None, None, None, None, seed, UNREAD, UNREAD


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, total, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    rows = total.shape[-1]
    padded = torch.nn.functional.pad(total, (0, -rows % 32), value=math.inf)
    return out, padded if compute_log_sumexp else UNREAD, seed, UNREAD


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, total, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    return out, total[..., None], None, None, None, None, seed, UNREAD, UNREAD


def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients by queries, keys, values and bias."""
    chosen = int(seed.flatten()[0]) if dropout else 0
    weights, dropped, _, values, factor = attention(
        query, key, value, bias, dropout, causal, scale, chosen
    )
    gradient = gradient.float()
    by_weight = gradient @ values.transpose(-2, -1)
    scores = dropped * by_weight - weights * (dropped * by_weight).sum(-1, keepdim=True)
    heads = key.shape[1]
    wide_key = key.repeat_interleave(query.shape[1] // heads, 1).float()
    by_query = scores @ wide_key * factor
    by_key = _per_head(scores.transpose(-2, -1) @ query.float() * factor, heads)
    by_value = _per_head(dropped.transpose(-2, -1) @ gradient, heads)
    by_bias = scores if bias is None else scores.to(bias.dtype)
    return by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype), by_bias


def _per_head(gradient: Tensor, heads: int) -> Tensor:
    per_head: Tensor = gradient.unflatten(1, (heads, -1)).sum(2)
    return per_head


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> Any:  # fmt: skip
    return attention_backward(
        grad_out, query, key, value, None, philox_seed, dropout_p, is_causal, scale
    )[:3]


def _efficient_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None,
    out: Tensor, logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float,
    grad_input_mask: Sequence[bool], is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    return attention_backward(
        grad_out_, query, key, value, attn_bias, philox_seed, dropout_p, is_causal, scale
    )


def _cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    philox_seed: Tensor, philox_offset: Tensor, attn_bias: Tensor | None, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    return attention_backward(
        grad_out, query, key, value, attn_bias, philox_seed, dropout_p, is_causal, scale
    )[:3]


# Batch norm.


def _batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    out, mean, deviation = _aten.native_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return out, mean, deviation, UNREAD


def _batch_norm_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    eps: float,
    reserve: Tensor,
) -> Any:
    return _aten.native_batch_norm_backward(
        grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, eps,
        [True, True, True],
    )  # fmt: skip


def _softmax(operator: Any) -> Callable[..., Any]:
    def compute(input: Tensor, dim: int, half_to_float: bool, **out: Tensor) -> Any:
        return operator(input.float() if half_to_float else input, dim, False, **out)

    return compute


def _softmax_backward(operator: Any) -> Callable[..., Any]:
    def compute(
        gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype, **out: Tensor
    ) -> Any:
        result = operator(gradient, output, dim, gradient.dtype, **out)
        return result if out else result.to(input_dtype)

    return compute


def rms_norm_backward(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: list[int],
    eps: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of ``torch.rms_norm`` by input and weight."""
    with with_autograd():
        data = leaf(input)
        scale = None if weight is None else leaf(weight)
        out = torch.rms_norm(data, normalized_shape, scale, eps)
        found = torch.autograd.grad(out, [data, *([] if scale is None else [scale])], gradient)
    return found[0], found[1] if scale is not None else None


def _fused_rms_norm_backward(
    gradient: Tensor, input: Tensor, normalized_shape: list[int], rstd: Tensor,
    weight: Tensor | None, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    wide = input.float()
    scale = rstd.float()
    grown = gradient.float() * (1.0 if weight is None else weight.float())
    dims = tuple(range(-len(normalized_shape), 0))
    shared = (grown * wide).mean(dims, keepdim=True)
    by_input = scale * grown - scale**3 * wide * shared
    by_weight = (gradient.float() * wide * scale).flatten(0, -len(normalized_shape) - 1).sum(0)
    return by_input.to(input.dtype), UNREAD if weight is None else by_weight.to(weight.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    **real_convolutions.KERNELS,
    **real_counting.KERNELS,
    **real_embeddings.KERNELS,
    **real_sync_batch_norm.KERNELS,
    **recurrent.KERNELS,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": _cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    # Only CUDA's take half precision and return float32, and back (SoftMax.cu).
    "aten::_softmax": _softmax(_aten._softmax),
    "aten::_softmax_backward_data": _softmax_backward(_aten._softmax_backward_data),
    "aten::_log_softmax": _softmax(_aten._log_softmax),
    "aten::_log_softmax_backward_data": _softmax_backward(_aten._log_softmax_backward_data),
    "aten::_fused_rms_norm_backward": _fused_rms_norm_backward,
}
"""By operator name."""
