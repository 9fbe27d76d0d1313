"""Results of the kernels of flash-attn 2, on the CPU and in float32: for tests that read values.

Masks and ALiBi are those that flash_attn/flash_attn_interface.py of 2.8.3 documents: aligned to the
last query and the last key. Only a GPU determines which elements are dropped out; softcap and pages
of keys are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.cpu_kernels.attention import packed_backward, packed_forward


class _Call(NamedTuple):
    """Arguments of all four operators, in order; torch leaves out those with default values."""

    dropout_p: float
    scale: float
    causal: bool
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None

    def bias(self, sequence: int, query: Tensor, key: Tensor) -> Tensor:
        """Return what is added to the scores of ``query`` and ``key``, from ``sequence`` on."""
        length, keys = query.shape[-2], key.shape[-2]
        distance = torch.arange(length)[:, None] + keys - length - torch.arange(keys)
        added, slopes = torch.zeros_like(distance, dtype=torch.float32), self.alibi_slopes
        if slopes is not None:  # of all heads, or of each sequence's
            slopes = slopes if slopes.dim() == 1 else slopes[sequence : sequence + len(query)]
            added = -slopes.float()[..., None, None] * distance.abs()
        right = 0 if self.causal else self.right
        before = distance < -right if right >= 0 else distance.new_zeros((), dtype=torch.bool)
        hidden = before | (distance > self.left) if self.left >= 0 else before
        return added.masked_fill(hidden, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Compute ``flash_attn::_flash_attn_forward``."""
    return _attend(q, k, v, (None, None), rest)


def varlen_forward(*args: Any, **others: Any) -> tuple[Tensor, ...]:
    """Compute ``flash_attn::_flash_attn_varlen_forward``."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, _, _, *rest = args
    if any(each is not None for each in (*rest[8:11], *map(others.get, _OF_CACHES))):
        raise NotImplementedError("paged or padded keys")
    return _attend(q, k, v, (cu_seqlens_q, cu_seqlens_k), rest)


def backward(*args: Any, **_: Any) -> Tensor:
    """Compute ``flash_attn::_flash_attn_backward``; gradients go into ``dq``, ``dk``, ``dv``."""
    dout, q, k, v, out, _lse, dq, dk, dv, *rest = args
    batch, length, heads, _size = q.shape
    softmax_d: Tensor = q.new_zeros((batch, heads, -(-length // 128) * 128), dtype=torch.float32)
    softmax_d[..., :length] = torch.einsum("bqhd,bqhd->bhq", dout.float(), out.float())
    _differentiate((dq, dk, dv), dout, q, k, v, lengths=(None, None), rest=rest)
    return softmax_d


def varlen_backward(*args: Any, **_: Any) -> Tensor:
    """Compute ``flash_attn::_flash_attn_varlen_backward``."""
    dout, q, k, v, _out, _lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, _, _, *rest = args
    lengths = cu_seqlens_q, cu_seqlens_k
    _differentiate((dq, dk, dv), dout, q, k, v, lengths=lengths, rest=rest)
    rows = q.shape[0] + 128 * (cu_seqlens_q.numel() - 1)
    softmax_d: Tensor = q.new_zeros((q.shape[1], rows), dtype=torch.float32)
    return softmax_d


_OF_CACHES = ("block_table", "leftpad_k", "seqused_k")
_Lengths = tuple[Tensor | None, Tensor | None]


def _call(rest: Sequence[Any]) -> _Call:
    call = _Call(*rest[:7])
    if call.dropout_p > 0 or call.softcap > 0:
        raise NotImplementedError("dropout or softcap")
    return call


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: _Lengths, rest: Sequence[Any]
) -> tuple[Tensor, ...]:
    """Return the output, its logsumexp, an empty mask, and a generator's state."""
    call = _call(rest)
    out, totals, _ = packed_forward(q, k, v, lengths, 0.0, 0, call.scale, call.bias)
    lse = totals[0] if lengths[0] is None else torch.cat([each[0] for each in totals], 1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _differentiate(
    into: Sequence[Tensor], *inputs: Tensor, lengths: _Lengths, rest: Sequence[Any]
) -> None:
    call, (dout, q, k, v) = _call(rest), inputs
    found = packed_backward(dout, q, k, v, lengths, torch.zeros(1), 0.0, 0, call.scale, call.bias)
    for target, gradient in zip(into, found[:3], strict=True):
        target.copy_(gradient)
