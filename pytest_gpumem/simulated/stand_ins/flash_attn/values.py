"""Results of the kernels of flash-attn 2, on the CPU and in float32: for tests that read values.

Masks, softcap and ALiBi are those that flash_attn/flash_attn_interface.py of 2.8.3 documents:
aligned to the last query and the last key. Only a GPU determines which elements are dropped out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.cpu_kernels.differentiated import leaf, with_autograd


class _Call(NamedTuple):
    """Arguments of all four operators, in their order; torch leaves out those at their default."""

    dropout_p: float
    scale: float
    causal: bool
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None

    def of(self, sequence: int) -> _Call:
        """Return the call for one sequence: slopes may be each sequence's own."""
        slopes = self.alibi_slopes
        if slopes is None or slopes.dim() == 1:
            return self
        return self._replace(alibi_slopes=slopes[sequence])


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """``flash_attn::_flash_attn_forward``."""
    call = _call(rest)
    results = [_attend(call.of(i), *each) for i, each in enumerate(zip(q, k, v, strict=True))]
    outs, sums = zip(*results, strict=True)
    return torch.stack(outs).to(q.dtype), torch.stack(sums), q.new_empty(0), _rng_state()


def varlen_forward(*args: Any, **others: Any) -> tuple[Tensor, ...]:
    """``flash_attn::_flash_attn_varlen_forward``."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, _, _, *rest = args
    call = _call(rest)
    if any(each is not None for each in (*rest[8:11], *map(others.get, _OF_CACHES))):
        raise NotImplementedError("paged or padded keys")
    outs, sums = [], []
    for i, (rows, keys) in enumerate(_sequences(cu_seqlens_q, cu_seqlens_k)):
        out, lse = _attend(call.of(i), q[rows], k[keys], v[keys])
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs).to(q.dtype), torch.cat(sums, 1), q.new_empty(0), _rng_state()


def backward(*args: Any, **_: Any) -> Tensor:
    """``flash_attn::_flash_attn_backward``; gradients go into ``dq``, ``dk``, ``dv``."""
    dout, q, k, v, out, _lse, dq, dk, dv, *rest = args
    call = _call(rest)
    batch, length, heads, _size = q.shape
    softmax_d: Tensor = q.new_zeros((batch, heads, -(-length // 128) * 128), dtype=torch.float32)
    for i in range(batch):
        made = _differentiate(call.of(i), dout[i], q[i], k[i], v[i], out[i])
        for into, gradient in zip((dq, dk, dv), made[:3], strict=True):
            into[i].copy_(gradient)
        softmax_d[i, :, :length] = made[3]
    return softmax_d


def varlen_backward(*args: Any, **_: Any) -> Tensor:
    """``flash_attn::_flash_attn_varlen_backward``."""
    dout, q, k, v, out, _lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, _, _, *rest = args
    call = _call(rest)
    count = cu_seqlens_q.numel() - 1
    softmax_d: Tensor = q.new_zeros((q.shape[1], q.shape[0] + 128 * count), dtype=torch.float32)
    for i, (rows, keys) in enumerate(_sequences(cu_seqlens_q, cu_seqlens_k)):
        made = _differentiate(call.of(i), dout[rows], q[rows], k[keys], v[keys], out[rows])
        dq[rows], dk[keys], dv[keys] = (each.to(q.dtype) for each in made[:3])
    return softmax_d


_OF_CACHES = ("block_table", "leftpad_k", "seqused_k")


def _call(rest: Sequence[Any]) -> _Call:
    call = _Call(*rest[:7])
    if call.dropout_p > 0:
        raise NotImplementedError("only a GPU knows what is dropped out")
    return call


def _rng_state() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    of_queries, of_keys = (list(pairwise(each.tolist())) for each in (cu_seqlens_q, cu_seqlens_k))
    for rows, keys in zip(of_queries, of_keys, strict=True):
        yield slice(*rows), slice(*keys)


def _scores(call: _Call, q: Tensor, k: Tensor) -> Tensor:
    """Return scores: (heads, queries, keys)."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
    if call.softcap > 0:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    length, keys = scores.shape[1:]
    distance = torch.arange(length)[:, None] + keys - length - torch.arange(keys)
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes.float()[:, None, None] * distance.abs()
    right = 0 if call.causal else call.right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if right >= 0:
        hidden |= distance < -right
    if call.left >= 0:
        hidden |= distance > call.left
    return scores.masked_fill(hidden, -torch.inf)


def _as_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.float().repeat_interleave(heads // tensor.shape[1], 1)


def _attend(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return one sequence's output (queries, heads, size) and logsumexp (heads, queries)."""
    heads = q.shape[1]
    scores = _scores(call, q.float(), _as_heads(k, heads))
    lse = torch.logsumexp(scores, -1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    weights = torch.exp(scores - lse[..., None])
    return torch.einsum("hqk,khd->qhd", weights, _as_heads(v, heads)), lse


def _differentiate(
    call: _Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> tuple[Tensor, ...]:
    """Return one sequence's gradients of q, k and v, and the sums of dout times out."""
    with with_autograd():
        leaves = [leaf(each.float()) for each in (q, k, v)]
        made, _ = _attend(call, *leaves)
        gradients = torch.autograd.grad(made, leaves, dout.float())
    return *gradients, torch.einsum("qhd,qhd->hq", dout.float(), out.float())
