"""The functions of flash-attn 2, what autograd saves for them, and how padding is removed.

Source: flash_attn/flash_attn_interface.py and flash_attn/bert_padding.py of flash-attn 2.8.3.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pytest_gpumem.simulated.operators.attention import with_padded_heads
from pytest_gpumem.simulated.operators.custom_kernels import simulate_operator
from pytest_gpumem.simulated.stand_ins.flash_attn.kernels import OPERATORS, with_cache

Window = tuple[int, int]
EVERYTHING: Window = (-1, -1)


class _Options(NamedTuple):
    """Options that all functions have."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool


class _Lengths(NamedTuple):
    """Positions and lengths of concatenated sequences."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: Tensor | None = None


class FlashAttention(torch.autograd.Function):
    """FlashAttnFunc and its siblings: q, k, v; q, kv; or qkv, where the last is stacked."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        lengths: _Lengths | None,
        probabilities: bool,
        grad: bool,
        *tensors: Tensor,
    ) -> Any:
        """Attend; with gradients, save inputs (padded ones if any), out and softmax_lse."""
        trains = grad and any(tensor.requires_grad for tensor in tensors)
        *separate, stacked = tensors
        count = 3 - len(separate)
        parts = [stacked] if count == 1 else [each.detach() for each in stacked.unbind(-3)]
        size = stacked.shape[-1]
        scale = size**-0.5 if options.softmax_scale is None else options.softmax_scale
        q, k, v = map(with_padded_heads, (*separate, *parts))
        name = "_flash_attn_forward" if lengths is None else "_flash_attn_varlen_forward"
        made = OPERATORS[name](
            q,
            k,
            v,
            *(() if lengths is None else lengths[:4]),
            options.dropout_p,
            scale,
            options.causal,
            *options.window_size,
            options.softcap,
            options.alibi_slopes,
            probabilities and options.dropout_p > 0,
            *(() if lengths is None else (lengths.block_table,)),
        )
        out, lse, mask, rng_state = made
        if trains:
            starts = () if lengths is None else lengths[:2]
            ctx.save_for_backward(q, k, v, out, lse, rng_state, *starts)
            ctx.options, ctx.scale, ctx.count = options, scale, count
            ctx.longest = () if lengths is None else lengths[2:4]
        out = out[..., :size]
        return (out, lse, mask) if probabilities else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        """Make gradients, stacked ones as one tensor."""
        q, k, v, out, lse, rng_state, *starts = ctx.saved_tensors
        options, count = ctx.options, ctx.count
        parts = [q, k, v]
        gradients = [torch.empty_like(part) for part in parts[: 3 - count]]
        if count > 1:
            stacked = parts[-1].new_empty((*parts[-1].shape[:-2], count, *parts[-1].shape[-2:]))
            into = [*gradients, *stacked.unbind(-3)]
            gradients.append(stacked)
        else:
            gradients.append(torch.empty_like(v))
            into = gradients
        name = "_flash_attn_varlen_backward" if starts else "_flash_attn_backward"
        OPERATORS[name](
            with_padded_heads(dout),
            q,
            k,
            v,
            out,
            lse,
            *into,
            *starts,
            *ctx.longest,
            options.dropout_p,
            ctx.scale,
            options.causal,
            *options.window_size,
            options.softcap,
            options.alibi_slopes,
            options.deterministic,
            rng_state,
        )
        return None, None, None, None, *(each[..., : dout.shape[-1]] for each in gradients)


_apply: Callable[..., Any] = FlashAttention.apply


def _attend(
    options: _Options, lengths: _Lengths | None, probabilities: bool, *tensors: Tensor
) -> Any:
    if not tensors[0].is_cuda:
        raise NotImplementedError(
            "Could not run 'flash_attn::_flash_attn_forward' with arguments from the 'CPU' backend"
        )
    return _apply(options, lengths, probabilities, torch.is_grad_enabled(), *tensors)


_OPTIONS: dict[str, Any] = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": EVERYTHING,
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
"""Parameters that all six functions have after their own, with their defaults."""


def _function(tensors: str, lengths: str = "", **more: Any) -> Callable[..., Any]:
    """Return a function of flash-attn with its signature, in which libraries look names up."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    signature = Signature(
        [
            *(Parameter(name, kind) for name in f"{tensors} {lengths}".split()),
            *(
                Parameter(name, kind, default=default)
                for name, default in {**_OPTIONS, **more}.items()
            ),
        ]
    )

    def attend(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = bound.arguments
        of_sequences: list[Any] = [given[name] for name in lengths.split()]
        if len(of_sequences) == 2:  # one for queries and keys
            of_sequences = [each for each in of_sequences for _ in range(2)]
        return _attend(
            _Options(*(given[name] for name in _Options._fields)),
            _Lengths._make([*of_sequences, given.get("block_table")]) if of_sequences else None,
            given["return_attn_probs"],
            *(given[name] for name in tensors.split()),
        )

    attend.__signature__ = signature  # type: ignore[attr-defined]  # as functools.wraps sets it
    return attend


_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"

FUNCTIONS = {
    "flash_attn_func": _function("q k v"),
    "flash_attn_kvpacked_func": _function("q kv"),
    "flash_attn_qkvpacked_func": _function("qkv"),
    "flash_attn_varlen_func": _function("q k v", _LENGTHS, block_table=None),
    "flash_attn_varlen_kvpacked_func": _function("q kv", _LENGTHS),
    "flash_attn_varlen_qkvpacked_func": _function("qkv", "cu_seqlens max_seqlen"),
}
"""By name. Tensors are (batch, length, heads, size), or (sum of lengths, heads, size) with the
starts of the sequences; packed ones have their 2 or 3 parts before the heads."""
for _name, _made in FUNCTIONS.items():
    _made.__name__ = _made.__qualname__ = _name


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attend to a cache, which takes new keys and values in place."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    k, v, cache_batch_idx, block_table = (
        tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()
        for tensor in (k, v, cache_batch_idx, block_table)
    )
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full(
            (k_cache.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device
        )
    out, lse = fwd_kvcache(
        *(q, k_cache, v_cache, (k, v), cache_seqlens, block_table, alibi_slopes, window_size),
        *(softcap, num_splits),
    )
    return (out, lse) if return_softmax_lse else out


def fwd_kvcache(*args: Any) -> Any:
    """Stand for ``flash_attn_2_cuda.fwd_kvcache``: its targets have unknown values afterwards."""
    raise RuntimeError("flash_attn_with_kvcache: q must be on CUDA")


simulate_operator(fwd_kvcache)(with_cache)
FUNCTIONS["flash_attn_with_kvcache"] = flash_attn_with_kvcache


class IndexFirstAxis(torch.autograd.Function):
    """The rows ``indices`` of a tensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor) -> Tensor:
        """Gather the rows."""
        ctx.save_for_backward(indices)
        ctx.rows, rest = values.shape[0], values.shape[1:]
        wide = indices[:, None].expand(-1, rest.numel())
        return torch.gather(values.reshape(ctx.rows, -1), 0, wide).reshape(-1, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Scatter the rows' gradients into zeros."""
        (indices,) = ctx.saved_tensors
        (grad,) = grads
        rest = grad.shape[1:]
        flat = grad.reshape(grad.shape[0], -1)
        made = torch.zeros([ctx.rows, flat.shape[1]], device=grad.device, dtype=grad.dtype)
        made.scatter_(0, indices[:, None].expand(-1, flat.shape[1]), flat)
        return made.reshape(ctx.rows, *rest), None


class IndexPutFirstAxis(torch.autograd.Function):
    """A tensor of zeros, with rows at ``indices``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, rows: int) -> Tensor:
        """Write the rows."""
        ctx.save_for_backward(indices)
        made = torch.zeros(rows, *values.shape[1:], device=values.device, dtype=values.dtype)
        made[indices] = values
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient of the rows at ``indices``."""
        (indices,) = ctx.saved_tensors
        return grads[0][indices], None, None


index_first_axis: Callable[..., Tensor] = IndexFirstAxis.apply
index_put_first_axis: Callable[..., Tensor] = IndexPutFirstAxis.apply


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return valid rows, their indices, starts of sequences, the longest, and used lengths."""
    masks = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = masks.sum(dim=-1, dtype=torch.int32)
    used_lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(masks.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    starts = pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, starts, int(longest), used_lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return (batch, seqlen, ...): the rows in their places, and zeros elsewhere."""
    made = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return made.reshape(batch, seqlen, *made.shape[1:])
