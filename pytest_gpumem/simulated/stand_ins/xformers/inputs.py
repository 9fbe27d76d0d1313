"""What xformers' attention takes, and whether it fits together.

Source: Inputs of xformers/ops/fmha/common.py of xformers 0.0.35.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pytest_gpumem.simulated.stand_ins.xformers import biases, padded

VARLEN = (biases.BlockDiagonalMask, padded.PartlyUsedKeysMask, padded.PagedBlockDiagonalMask)
"""Masks of sequences that lie one behind the other."""


@dataclass
class Inputs:
    """What all functions take, in the order of (batch, length, heads, size)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int] | None:
        """Where sequences of queries and keys begin, and the longest of each."""
        bias = self.attn_bias
        if not isinstance(bias, VARLEN):
            return None
        queries, keys = bias.q_seqinfo, bias.k_seqinfo
        return queries.seqstart, keys.seqstart, queries.max_seqlen, keys.max_seqlen

    @property
    def used(self) -> Tensor | None:
        """How many keys of each sequence are in use, where not all are."""
        bias = self.attn_bias
        return bias.k_seqinfo.seqlen if isinstance(bias, padded.PartlyUsedKeysMask) else None

    @property
    def bias(self) -> Tensor | None:
        """What is added to the scores as a matrix."""
        if isinstance(self.attn_bias, biases.LowerTriangularMaskWithTensorBias):
            return self.attn_bias._bias
        return self.attn_bias if isinstance(self.attn_bias, Tensor) else None

    def checked(self) -> Inputs:
        """With four dimensions; raises ``ValueError`` for what does not fit together."""
        tensors = (self.query, self.key, self.value)
        shapes = "\n".join(
            f"  {name}.shape: {tensor.shape}"
            for name, tensor in zip(("query", "key  ", "value"), tensors, strict=True)
        )
        if self.query.ndim not in (3, 4, 5) or len({each.ndim for each in tensors}) > 1:
            raise ValueError(f"Query/Key/Value should all have BMGHK, BMHK or BMK shape.\n{shapes}")
        if len({each.device for each in tensors}) > 1:
            raise ValueError("Query/Key/Value should all be on the same device")
        if len({each.dtype for each in tensors}) > 1:
            raise ValueError("Query/Key/Value should either all have the same dtype")
        if not 0 <= self.p <= 1:
            raise ValueError(f"Invalid dropout probability: p={self.p}")
        q, k, v = (each.shape for each in tensors)
        middle = slice(2, -1)
        if k != (q[0], k[1], *q[middle], q[-1]) or v != (q[0], k[1], *q[middle], v[-1]):
            raise ValueError(f"Incompatible shapes for attention inputs:\n{shapes}")
        if isinstance(self.attn_bias, VARLEN) and q[0] != 1:
            raise ValueError(f"Expected batch_size=1 when using block-diagonal bias\n{shapes}")
        if self.query.ndim != 3:
            self._check_bias()
            return self
        bias = self.attn_bias
        if isinstance(bias, Tensor):
            bias = bias.unsqueeze(1)
        query, key, value = (each.unsqueeze(2) for each in tensors)
        return replace(self, query=query, key=key, value=value, attn_bias=bias)

    def _check_bias(self) -> None:
        bias = self.bias
        if bias is None or self.query.ndim != 4:
            return
        batch, length, heads, _ = self.query.shape
        expected = (batch, heads, length, self.key.shape[1])
        if bias.shape != expected:
            raise ValueError(
                f"Invalid shape for attention bias: {tuple(bias.shape)} (expected {expected})"
            )
