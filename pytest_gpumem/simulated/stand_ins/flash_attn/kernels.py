"""Allocations of the kernels of flash-attn 2.

Source: csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3 (mha_fwd, mha_varlen_fwd, mha_bwd,
mha_varlen_bwd, mha_fwd_kvcache, set_params_splitkv), and the operators that
flash_attn/flash_attn_interface.py registers for them. Locals of C++ die in the reverse of the
order in which they were declared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.signatures import Signature
from pytest_gpumem.simulated.operators.attention import with_padded_heads
from pytest_gpumem.simulated.operators.attention_choice import splits_of
from pytest_gpumem.simulated.operators.custom_kernels import DESCRIPTIONS
from pytest_gpumem.simulated.operators.layout import HALF_DTYPES, round_up
from pytest_gpumem.simulated.stand_ins.flash_attn import values
from pytest_gpumem.simulated.stand_ins.imports import used


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate as mha_fwd; return out, softmax_lse, S_dmask and rng_state."""
    q, k, v = _contiguous(q, k, v)
    _check(q, k, v, dropout_p, softcap)
    batch, length, heads, size = q.shape
    keys, key_heads = k.shape[1:3]
    # With one query, causal means nothing; a window that holds all keys is none.
    swapped = (
        length == 1
        and heads > key_heads
        and not 0 <= window_size_left < keys
        and not 0 <= window_size_right < keys
        and not dropout_p
        and alibi_slopes is None
    )
    if swapped:
        q = q.reshape(batch, key_heads, heads // key_heads, size).transpose(1, 2)
        length, heads = heads // key_heads, key_heads
    out, lse = _results(q)
    mask = _mask(q, batch, heads, length, keys, kept=return_softmax)
    parts = [] if dropout_p else _parts(q, batch, heads, length, keys)
    rng_state = q.new_empty((2,), dtype=torch.int64)
    _drop(parts)
    return *(_as_one_query(out, lse) if swapped else (out, lse)), mask, rng_state


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
    zero_tensors: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate as mha_varlen_fwd; return out, softmax_lse, S_dmask and rng_state."""
    q, k, v = _contiguous(q, k, v)
    _check(q, k, v, dropout_p, softcap)
    _check_lengths(cu_seqlens_q, cu_seqlens_k)
    batch, heads, size = cu_seqlens_q.numel() - 1, *q.shape[1:]
    key_heads = k.shape[-2]
    groups = heads // key_heads
    # Here the window is compared with the keys only after this decision.
    swapped = (
        max_seqlen_q == 1
        and groups > 1
        and max(window_size_left, window_size_right) < 0
        and not dropout_p
        and alibi_slopes is None
    )
    if swapped:
        q = q.reshape(batch, key_heads, groups, size).transpose(1, 2).flatten(0, 1)
        max_seqlen_q, heads = groups, key_heads
    out = torch.empty_like(q)
    lse = q.new_empty((heads, q.shape[0]), dtype=torch.float32)
    mask = _mask(q, batch, heads, max_seqlen_q, max_seqlen_k, kept=return_softmax)
    if zero_tensors:
        out.zero_()
        lse.fill_(-torch.inf)
    parts = _parts(q, batch, heads, max_seqlen_q, max_seqlen_k) if swapped else []
    rng_state = q.new_empty((2,), dtype=torch.int64)
    if swapped:
        before, after = (batch, groups, key_heads, size), (batch, groups * key_heads, size)
        out = out.reshape(before).transpose(1, 2).reshape(after)
        q = q.reshape(before).transpose(1, 2).reshape(after)
        lse = lse.reshape(heads * groups, batch)
    _drop(parts)
    return out, lse, mask, rng_state


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softcap: float,
    deterministic: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Allocate as mha_bwd, or mha_varlen_bwd with 128 rows more a sequence; return softmax_d."""
    dout, q, k, v, out = _contiguous(dout, q, k, v, out)
    _check(q, k, v, dropout_p, softcap)
    *lengths, heads, size = q.shape
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        _check_lengths(cu_seqlens_q, cu_seqlens_k)
        batch = cu_seqlens_q.numel() - 1
        rows = [lengths[0] + 128 * batch]
    else:
        batch = lengths[0]
        rows = [batch, round_up(lengths[1], 128)]
    dq, dk, dv = (
        torch.empty_like(like) if given is None else given
        for given, like in ((dq, q), (dk, k), (dv, v))
    )
    softmax_d = q.new_empty((*rows[:-1], heads, rows[-1]), dtype=torch.float32)
    accumulated = (*rows, heads, _rounded(size))
    _accumulate(q, k, (dk, dv), accumulated, batch * heads, deterministic=deterministic)
    return softmax_d


def with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: tuple[Tensor | None, Tensor | None],
    seqlens_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Allocate as mha_fwd_kvcache; return out and softmax_lse."""
    _require(
        new[0] is None or seqlens_k is not None,
        "If key is supplied, seqlens_k must also be passed in",
    )
    _check(q, k_cache, v_cache, 0.0, softcap, any_size=True)
    batch, length, heads, size = q.shape
    keys, key_heads = k_cache.shape[1:3]
    if block_table is not None:
        keys *= block_table.shape[1]
    swapped = (
        length == 1
        and heads > key_heads
        and max(window_size) < 0
        and size % 8 == 0
        and alibi_slopes is None
    )
    if swapped:
        q = q.reshape(batch, key_heads, heads // key_heads, size).transpose(1, 2)
        length, heads = heads // key_heads, key_heads
    q, wide_keys, wide_values = map(with_padded_heads, (q, k_cache, v_cache))
    out, lse = _results(q)
    given = [with_padded_heads(each) for each in new if each is not None]
    parts = _parts(q, batch, heads, length, keys, num_splits)
    if size % 8:
        out = out[..., :size]
        if given:
            k_cache.copy_(wide_keys[..., :size])
            v_cache.copy_(wide_values[..., :size])
    if swapped:
        out, lse = _as_one_query(out, lse)
    _drop(parts)
    _drop(given)
    return out, lse


# Common parts.


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and softmax_lse for queries (batch, length, heads, size)."""
    batch, length, heads, _ = q.shape
    return torch.empty_like(q), q.new_empty((batch, heads, length), dtype=torch.float32)


def _as_one_query(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of one query, computed with the heads of a group as its length."""
    batch, length, heads, size = out.shape
    out = out.transpose(1, 2).reshape(batch, 1, heads * length, size)
    return out, lse.reshape(batch, heads * length, 1)


def _rounded(size: int) -> int:
    """Return head_size_rounded."""
    return round_up(size, 32 if size <= 128 else 64)


def _mask(q: Tensor, batch: int, heads: int, length: int, keys: int, *, kept: bool) -> Tensor:
    shape = (batch, heads, round_up(length, 128), round_up(keys, 128)) if kept else (0,)
    return q.new_empty(shape)


def _parts(
    q: Tensor, batch: int, heads: int, length: int, keys: int, splits: int = 0
) -> list[Tensor]:
    """Allocate as set_params_splitkv: softmax_lse_accum and out_accum, if the keys are split."""
    size = q.shape[-1]
    if splits < 1:
        blocks = batch * heads * -(-length // 64)
        splits = splits_of(_processors(q), blocks, size, keys)
    if splits <= 1:
        return []
    _require(splits <= 128, "num_splits > 128 not supported")
    rows = splits, batch, heads, length
    return [
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty((*rows, _rounded(size)), dtype=torch.float32),
    ]


def _accumulate(
    q: Tensor,
    k: Tensor,
    made: tuple[Tensor, Tensor],
    accumulated: tuple[int, ...],
    pairs: int,
    *,
    deterministic: bool,
) -> None:
    """Allocate dq_accum, and gradients of keys and values by query head, summed at the end."""
    if deterministic:
        splits = -(-_processors(q) // pairs)
        scratch = [q.new_zeros((splits, *accumulated), dtype=torch.float32)]
    else:
        scratch = [q.new_empty(accumulated, dtype=torch.float32)]
    heads, key_heads = q.shape[-2], k.shape[-2]
    if heads != key_heads:
        scratch += [q.new_empty((*k.shape[:-2], heads, k.shape[-1])) for _ in made]
        by_group = (*k.shape[:-1], heads // key_heads, k.shape[-1])
        for gradient, expanded in zip(made, scratch[1:], strict=True):
            torch.sum(expanded.reshape(by_group), -2, out=gradient)
        del expanded
    _drop(scratch)


def _drop(scratch: list[Tensor]) -> None:
    """Free ``scratch``, the newest first."""
    while scratch:
        scratch.pop()


def _processors(tensor: Tensor) -> int:
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, softcap: float, *, any_size: bool = False
) -> None:
    """Check the conditions that users may violate, with the library's errors."""
    used()
    newest = torch.cuda.get_device_capability(q.device)[0] >= 8
    _require(newest, "FlashAttention only supports Ampere GPUs or newer.")
    _require(q.dtype in HALF_DTYPES, "FlashAttention only support fp16 and bf16 data type")
    _require(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _require(tensor.is_cuda, f"{name} must be on CUDA")
    heads, size = q.shape[-2:]
    _require(size <= 256, "FlashAttention forward only supports head dimension at most 256")
    _require(
        any_size or size % 8 == 0,
        "query, key, value, and out_ must have a head_size that is a multiple of 8",
    )
    _require(
        heads % k.shape[-2] == 0,
        "Number of heads in key/value must divide number of heads in query",
    )
    for name, tensor in (("k", k), ("v", v)):
        shape = ", ".join(map(str, (*k.shape[:-1], size)))
        _require(tensor.shape == (*k.shape[:-1], size), f"{name} must have shape ({shape})")
    _require(softcap <= 0 or not dropout, "Softcapping does not support dropout for now")


def _check_lengths(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        is_right = tensor.is_cuda and tensor.dtype == torch.int32
        _require(is_right, f"{name} must have dtype int32 and be on CUDA")
    _require(cu_seqlens_q.numel() > 1, "batch size must be positive")


# The operators that the library registers.

_SHARED = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left{none}, "
    "SymInt window_size_right{none}, float softcap{zero}, Tensor? alibi_slopes{nothing}"
)
_REQUIRED = _SHARED.format(none="", zero="", nothing="")
_OPTIONAL = _SHARED.format(none="=-1", zero="=0.0", nothing="=None")
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_GRADIENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
)
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"


class _Described(NamedTuple):
    schema: str
    description: Any
    values: Any
    """The function that computes the kernel's values on the CPU."""
    mutates: tuple[str, ...] = ()


_OPERATORS = {
    "_flash_attn_forward": _Described(
        f"(Tensor q, Tensor k, Tensor v, {_REQUIRED}, bool return_softmax) -> {_FOUR}",
        forward,
        values.forward,
    ),
    "_flash_attn_varlen_forward": _Described(
        f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_OPTIONAL}, bool return_softmax=False, "
        f"Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
        f"bool zero_tensors=False) -> {_FOUR}",
        varlen_forward,
        values.varlen_forward,
    ),
    "_flash_attn_backward": _Described(
        f"({_GRADIENTS}, {_REQUIRED}, bool deterministic, Tensor? rng_state=None) -> Tensor",
        backward,
        values.backward,
        ("dq", "dk", "dv"),
    ),
    "_flash_attn_varlen_backward": _Described(
        f"({_GRADIENTS}, {_LENGTHS}, {_REQUIRED}, bool deterministic, Tensor? rng_state=None, "
        f"bool zero_tensors=False) -> Tensor",
        backward,
        values.varlen_backward,
        ("dq", "dk", "dv"),
    ),
}


def _register(name: str, described: _Described) -> Any:
    """Register an operator and return it; a description of the user's own comes first."""

    def run(*args: Any, **options: Any) -> Any:
        raise RuntimeError(f"the stand-in of {name} runs on a simulated GPU only")

    operator = torch.library.custom_op(
        name, run, mutates_args=described.mutates, device_types="cuda", schema=described.schema
    )
    description = Signature(operator._opoverload._schema).bound(described.description)
    operator.register_fake(description)
    operator.register_kernel("cpu", described.values)
    DESCRIPTIONS.operators.setdefault(name, description)
    return operator


OPERATORS = {
    name: _register(f"flash_attn::{name}", described) for name, described in _OPERATORS.items()
}
"""By their names in ``torch.ops.flash_attn``."""
