"""Masks whose keys lie apart: padded, gappy and in pages.

Source: xformers/ops/fmha/attn_bias.py of xformers 0.0.35. Torch's kernels take no pages there
(``_is_paged_attention_supported`` of flash.py): attention with one of these masks finds no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.xformers.biases import (
    AttentionBias,
    LocalAttentionFromBottomRightMask,
    SeqLenInfo,
    Shape,
    default_device,
    triangle,
)


def _on(numbers: Sequence[int], device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int32)
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


@dataclass
class _PartlyUsed(SeqLenInfo):
    """Where sequences begin, and how long each is."""

    seqlen: Tensor
    seqlen_py: Sequence[int]

    def to(self, device: Any) -> Self:
        """The same on ``device``."""
        moved = self.seqstart.to(device), self.seqlen.to(device)
        return replace(self, seqstart=moved[0], seqlen=moved[1])

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Where each begins and ends."""
        for (start, _), length in zip(pairwise(self.seqstart_py), self.seqlen_py, strict=False):
            yield start, start + length

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> SeqLenInfo:
        """Refuse: lengths alone do not say where sequences begin."""
        raise RuntimeError(f"{cls.__name__} needs to know where sequences begin")

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Refuse, as the library does."""
        raise NotImplementedError(f"{type(self).__name__}.split")


@dataclass
class PaddedSeqLenInfo(_PartlyUsed):
    """Sequences that have the same room each."""

    padding: int

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Sequence[int], padding: int, *, device: Any = None
    ) -> PaddedSeqLenInfo:
        """Make it of their lengths and the room of each."""
        assert all(each <= padding for each in seqlens), f"Seqlens {seqlens} Padding {padding}"
        on = default_device(device)
        starts = [padding * index for index in range(len(seqlens) + 1)]
        lengths = _on(list(seqlens), on)
        return cls(
            _on(starts, on), max(seqlens), min(seqlens), starts, lengths, list(seqlens), padding
        )


@dataclass
class GappySeqInfo(_PartlyUsed):
    """Sequences that begin anywhere."""

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *, device: Any
    ) -> GappySeqInfo:
        """Make it of where they begin, with the end of all, and of their lengths."""
        if not seqlens:
            raise ValueError("No elements")
        if len(seqstarts) - len(seqlens) != 1:
            raise ValueError(f"len(seqstarts)={seqstarts} should be len(seqlens)={seqlens}")
        starts, most, least = list(seqstarts), max(seqlens), min(seqlens)
        if paged:
            starts.append(-1)
            seqlens = [start + each for start, each in zip(starts, seqlens, strict=False)]
        on = default_device(device)
        lengths = _on(list(seqlens), on)
        return cls(_on(starts, on), most, least, starts, lengths, seqlens)


@dataclass
class PartlyUsedKeysMask(AttentionBias):
    """Queries of a sequence see those keys of the same one that are in use."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: Any

    def to(self, device: Any) -> Self:
        """The same on ``device``."""
        moved = self.q_seqinfo.to(device), self.k_seqinfo.to(device)
        return replace(self, q_seqinfo=moved[0], k_seqinfo=moved[1])

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.zeros([1], dtype=dtype, device=device)

    def materialize(
        self, shape: Shape, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """The matrix."""
        infos = (("q", self.q_seqinfo, shape[-2]), ("k", self.k_seqinfo, shape[-1]))
        for name, info, length in infos:
            if length != info.seqstart_py[-1]:
                raise ValueError(f"{name} shapes wrong")
        mask = torch.empty(shape[-2:], dtype=dtype, device=device)
        mask.fill_(-math.inf)
        both = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for (first, last), (start, end) in both:
            mask[first:last, start:end] = self._block((last - first, end - start), dtype, device)
        return mask[(None,) * (len(shape) - 2)].expand(shape)


def _infos(
    q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], device: Any
) -> tuple[SeqLenInfo, PaddedSeqLenInfo]:
    assert len(q_seqlen) == len(kv_seqlen), (q_seqlen, kv_seqlen)
    queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
    return queries, PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)


@dataclass
class BlockDiagonalPaddedKeysMask(PartlyUsedKeysMask):
    """Keys of all sequences have the same room."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Any = None,
    ) -> Self:
        """Make it of the lengths of queries and keys, and the room of the latter."""
        return cls(*_infos(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(
        self, block_tables: Tensor, page_size: int, paged_type: type[PagedBlockDiagonalMask]
    ) -> PagedBlockDiagonalMask:
        """Let keys lie in pages."""
        room = replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, room, block_tables, page_size)

    def make_local_attention(
        self, window_left: int, window_right: int
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """Hide keys that are farther away than the windows."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(
            self.q_seqinfo, self.k_seqinfo, window_left, window_right
        )


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Each block is causal from its last key."""

    causal_diagonal: Any = None

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        return triangle(shape, dtype, device, shape[-1] - shape[-2])


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Each block has windows around the places from the last key."""

    window_left: int
    window_right: int

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        local = LocalAttentionFromBottomRightMask(self.window_left, self.window_right)
        return local.materialize(shape, dtype, device)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> Self:
        """Make it of lengths and windows."""
        return cls(*_infos(q_seqlen, kv_padding, kv_seqlen, None), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Each block is causal from its last key, with a window."""

    _window_size: int

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        return triangle(shape, dtype, device, shape[-1] - shape[-2], self._window_size)

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_size: int,
    ) -> Self:
        """Make it of lengths and a window."""
        return cls(*_infos(q_seqlen, kv_padding, kv_seqlen, None), window_size)


@dataclass
class BlockDiagonalGappyKeysMask(PartlyUsedKeysMask):
    """Keys of a sequence begin anywhere."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: Any = None,
    ) -> Self:
        """Make it of the lengths of queries, and the beginnings and lengths of keys."""
        assert len(q_seqlen) == len(kv_seqlen), (q_seqlen, kv_seqlen)
        queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
        keys = GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device)
        return cls(queries, keys)


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Each block is causal from its last key."""

    def _block(self, shape: Shape, dtype: torch.dtype, device: Any) -> Tensor:
        return triangle(shape, dtype, device, shape[-1] - shape[-2])


@dataclass
class PagedBlockDiagonalMask(AttentionBias):
    """Keys lie in pages."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: Any
    block_tables: Tensor
    page_size: int

    @classmethod
    def _checked(cls, block_tables: Tensor, rows: int) -> None:
        assert len(block_tables) == rows, (block_tables.shape, rows)


@dataclass
class PagedBlockDiagonalPaddedKeysMask(PagedBlockDiagonalMask):
    """Keys of a sequence have a row of pages."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Any = None,
    ) -> Self:
        """Make it of lengths, and of which pages each sequence has."""
        cls._checked(block_tables, len(kv_seqlen))
        room = block_tables.shape[1] * page_size
        return cls(*_infos(q_seqlen, room, kv_seqlen, device), block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Each block is causal from its last key."""


@dataclass
class PagedBlockDiagonalGappyKeysMask(PagedBlockDiagonalMask):
    """Keys of a sequence begin anywhere in its row of pages."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Any = None,
    ) -> Self:
        """Make it of lengths, beginnings, and of which pages each sequence has.

        Raises ``ValueError`` for as many beginnings as lengths, which is what it takes: so does
        the library.
        """
        cls._checked(block_tables, len(kv_seqlen))
        queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
        keys = GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device)
        return cls(queries, keys, block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """Each block is causal from its last key."""
