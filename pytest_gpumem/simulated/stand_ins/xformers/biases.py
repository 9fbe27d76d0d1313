"""Masks of attention: xformers/ops/fmha/attn_bias.py of xformers 0.0.35.

Masks hold where sequences begin on the GPU; no matrix is made unless one is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

Shape = tuple[int, ...]


class AttentionBias:
    """What is added to the scores of attention."""

    def to(self, device: Any) -> Self:
        """The same on ``device``."""
        return self

    def materialize(
        self, shape: Shape, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The matrix (..., queries, keys)."""
        raise NotImplementedError


def triangle(
    shape: Shape, dtype: torch.dtype, device: Any, shift: int, window: int | None = None
) -> Tensor:
    """_materialize_causal_mask()."""
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    ones = torch.full(shape, dtype=wide, fill_value=1, device=device)
    mask = torch.tril(ones, diagonal=shift).to(dtype)
    if window is not None:
        mask = torch.triu(mask, diagonal=shift - window + 1)
    return torch.log(mask).to(dtype)


class LowerTriangularMask(AttentionBias):
    """A query sees keys up to its own place from the first."""

    def __init__(self, device: Any = None) -> None: ...

    def materialize(
        self, shape: Shape, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The matrix."""
        return triangle(shape, dtype, device, 0)

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """Add a matrix to the mask."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """The mask with a matrix added."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def materialize(
        self, shape: Shape, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The matrix."""
        return super().materialize(shape, dtype, device) + self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """A query sees keys up to its own place from the last."""

    def materialize(
        self, shape: Shape, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The matrix."""
        return triangle(shape, dtype, device, shape[-1] - shape[-2])

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Hide keys that are farther away than the window."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """The mask, with a window."""

    _window_size: int

    def __post_init__(self) -> None:
        if self._window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={self._window_size}")

    def materialize(
        self, shape: Shape, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The matrix."""
        return triangle(shape, dtype, device, shape[-1] - shape[-2], self._window_size)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A query sees keys in a window around its own place from the last."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(
                    f"Invalid window value passed to `LocalAttentionFromBottomRightMask`: "
                    f"expected`{name} > 0` but got {name}={value}"
                )

    def materialize(
        self, shape: Shape, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The matrix."""
        shift = shape[-1] - shape[-2]
        wide = torch.float32 if dtype is torch.bfloat16 else dtype
        ones = torch.full(shape, dtype=wide, fill_value=1, device=device)
        mask = torch.triu(ones, diagonal=shift - self.window_left)
        return torch.log(torch.tril(mask, diagonal=shift + self.window_right)).to(dtype)


def default_device(device: Any) -> torch.device:
    """_get_default_bias_device()."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class SeqLenInfo:
    """Where sequences begin that lie one behind the other."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> SeqLenInfo:
        """Make it of their lengths."""
        lengths = list(seqlens)
        starts = [0, *accumulate(lengths)]
        on = default_device(device)
        if on.type == "cpu":
            seqstart = torch.tensor(starts, dtype=torch.int32)
        else:
            seqstart = torch.tensor(starts, dtype=torch.int32, pin_memory=True)
            seqstart = seqstart.to(on, non_blocking=True)
        return cls(seqstart, max(lengths, default=-1), min(lengths, default=-1), starts)

    def to(self, device: Any) -> SeqLenInfo:
        """The same on ``device``."""
        return replace(self, seqstart=self.seqstart.to(device))

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Where each begins and ends."""
        return pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Take (1, all lengths together, ...) apart."""
        if self.seqstart_py[-1] != x.shape[1] or x.shape[0] != 1:
            raise ValueError(
                f"Invalid `torch.Tensor` of shape {x.shape}, expected format (B, M, *) with B=1 "
                f"and M={self.seqstart_py[-1]}\n seqstart: {self.seqstart_py}"
            )
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else batch_sizes
        ends = [self.seqstart_py[count] for count in accumulate(sizes, initial=0)]
        chunks = x.split([end - start for start, end in pairwise(ends)], dim=1)
        return [
            each.reshape([size, -1, *each.shape[2:]])
            for size, each in zip(sizes, chunks, strict=True)
        ]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape([1, -1, *each.shape[2:]]) for each in tensors], dim=1)


@dataclass
class BlockDiagonalMask(AttentionBias):
    """Queries of a sequence see the keys of the same one."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    def to(self, device: Any) -> Self:
        """The same on ``device``."""
        return replace(
            self, q_seqinfo=self.q_seqinfo.to(device), k_seqinfo=self.k_seqinfo.to(device)
        )

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def materialize(
        self, shape: Shape, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The matrix."""
        mask = torch.full(shape[-2:], -math.inf, dtype=dtype, device=device)
        both = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for (first, last), (start, end) in both:
            mask[first:last, start:end] = self._block((last - first, end - start), dtype, device)
        return mask[(None,) * (len(shape) - 2)].expand(shape)

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: Any = None,
    ) -> Self:
        """Make it of the lengths of queries and keys."""
        assert kv_seqlen is None or len(q_seqlen) == len(kv_seqlen)
        queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or q_seqlen == kv_seqlen:
            return cls(queries, queries)
        return cls(queries, SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """Put tensors (batch, length, ...) one behind the other."""
        made = cls.from_seqlens([each.shape[1] for each in tensors for _ in range(each.shape[0])])
        made._batch_sizes = [each.shape[0] for each in tensors]
        return made, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """Put queries, keys and values one behind the other."""
        lengths = ([each.shape[1] for each in some for _ in range(each.shape[0])]
                   for some in (tensors_q, tensors_k))  # fmt: skip
        made = cls.from_seqlens(*lengths)
        made._batch_sizes = [each.shape[0] for each in tensors_q]
        values = None if tensors_v is None else _joined(tensors_v)
        return made, _joined(tensors_q), _joined(tensors_k), values

    def split_queries(self, tensor: Tensor) -> Sequence[Tensor]:
        """Take queries apart."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> Sequence[Tensor]:
        """Take keys or values apart."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Take apart what is as long as queries and keys."""
        assert self.q_seqinfo is self.k_seqinfo
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def _as(self, kind: Any, *window: int) -> Any:
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, *window)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Make each block causal from its first key."""
        made: BlockDiagonalCausalMask = self._as(BlockDiagonalCausalMask)
        return made

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Make each block causal from its last key."""
        made: BlockDiagonalCausalFromBottomRightMask = self._as(
            BlockDiagonalCausalFromBottomRightMask
        )
        return made

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Make each block causal, with a window."""
        made: BlockDiagonalCausalLocalAttentionMask = self._as(
            BlockDiagonalCausalLocalAttentionMask, window_size
        )
        return made

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """Make each block causal from its last key, with a window."""
        made: BlockDiagonalCausalLocalAttentionFromBottomRightMask = self._as(
            BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size
        )
        return made


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Each block is causal from its first key."""

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        return triangle(shape, dtype, device, 0)


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Each block is causal from its last key."""

    def __post_init__(self) -> None:
        both = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for i, ((first, last), (start, end)) in enumerate(both):
            if end - start < last - first:
                raise ValueError(
                    f"Block #{i} has num_keys={end - start} and num_queries={last - first}. "
                    f"Expected `num_keys >= num_queries`"
                )

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        return triangle(shape, dtype, device, shape[-1] - shape[-2])


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Each block is causal, with a window."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        if self._window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={self._window_size}")

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        return triangle(shape, dtype, device, 0, self._window_size)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Each block of all keys is causal from its last key, with a window."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={self._window_size}")

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        return triangle(shape, dtype, device, shape[-1] - shape[-2], self._window_size)
