"""How flash-attn 3 takes keys apart: hopper/tile_size.h, hopper/heuristics.h, get_num_splits.

Of flash-attn 3.0.0 (hopper/, July 2026), for elements of two bytes and of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LAST_LEVEL_CACHE = 50 * 1024 * 1024
_MOST_SPLITS = 128


def rounded(size: int) -> int:
    """round_up_headdim, round_up_headdimv."""
    return next((each for each in (64, 96, 128, 192, 256) if size <= each), 512)


@dataclass(frozen=True)
class Call:
    """What the choice depends on; sizes in elements."""

    arch: int
    processors: int
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int
    value_size: int
    itemsize: int
    is_causal: bool
    is_local: bool
    window: tuple[int, int]
    has_softcap: bool
    is_varlen: bool
    appends: bool
    page: int
    """Keys of a page; 0 without pages."""
    has_leftpad: bool

    def tile(self, *, by_tma: bool = False) -> tuple[int, int]:
        """kBlockM and kBlockN of the forward kernel."""
        paged = self.page > 0
        if self.arch >= 90:
            return self._hopper(paged=paged and not by_tma)
        return self._ampere(paged=paged)

    def _hopper(self, *, paged: bool) -> tuple[int, int]:
        size = rounded(self.size)
        value_size = size if self.value_size == self.size else rounded(self.value_size)
        masked = self.is_causal or self.is_local or paged
        if self.itemsize == 1:
            return self._hopper_in_bytes(size, paged=paged)
        if size <= 64:
            if value_size in (512, 256):
                return (64, 64) if value_size == 512 else (128, 96)
            return 192, 128 if masked else 192
        if size <= 96:
            return 192, 128 if self.is_local or paged else 144
        if size <= 128:
            return 128, 128 if masked else 176
        if size <= 192:
            return 128, 96 if paged or self.is_local else 128 if value_size <= 128 else 112
        return 128, 64 if self.is_local else 80

    def _hopper_in_bytes(self, size: int, *, paged: bool) -> tuple[int, int]:
        if size <= 96:
            return 192, 160 if size <= 64 else 128
        if size <= 128:
            return 128, 160 if paged else 192 if self.has_softcap and self.is_local else 224
        if size <= 192:
            return 128, 128 if (paged or self.has_softcap) and self.is_local else 160
        return 128, 64 if self.is_local else 128

    def _ampere(self, *, paged: bool) -> tuple[int, int]:
        size, small = rounded(self.size), self.arch in (86, 89)
        varlen, local = self.is_varlen, self.is_local
        if size <= 64:
            return 128, 80 if varlen else 96 if local else 112
        if size <= 96:
            return 128, 48 if varlen or local else 64
        if size <= 128:
            if varlen or small:
                return 128, 96 if local else 112 if varlen else 128
            return 128, 48 if local else 64
        if size <= 192:
            return 128, 64 if self.appends or local or varlen or paged else 96
        if small:
            return 128, 32 if self.appends else 48 if varlen or local else 64
        return 128, 48 if self.appends else 64 if varlen or local else 96

    def _by_tma(self) -> bool:
        """get_pagedkv_tma."""
        if self.arch < 90 or not self.page or self.has_leftpad or self.appends:
            return False
        rows, columns = self.tile(by_tma=True)
        return self.page % columns == 0 and self.queries * (self.heads // self.key_heads) > rows

    def splits(self) -> int:
        """get_num_splits and num_splits_heuristic."""
        rows, columns = self.tile(by_tma=self._by_tma())
        keys = self.keys
        if self.is_local:
            keys = max(0, min(keys, sum(self.window) + 1 + rows))
        key_blocks = -(-keys // columns)
        query_blocks = -(-self.queries * (self.heads // self.key_heads) // rows)
        blocks = (1 if self.is_varlen else self.batch) * self.key_heads * query_blocks
        of_head = self.keys * (self.size + self.value_size) * self.itemsize
        masked = self.is_causal or self.is_local
        if blocks >= 0.8 * self.processors:
            if of_head > _LAST_LEVEL_CACHE and query_blocks >= 2 * self.processors and not masked:
                return min(-(-of_head // _LAST_LEVEL_CACHE), _MOST_SPLITS)
            return 1
        if key_blocks <= 4:
            return 1
        efficiency = []
        for splits in range(1, min(_MOST_SPLITS, self.processors, key_blocks) + 1):
            waves = blocks * splits / self.processors
            efficiency.append(waves / math.ceil(waves))
        best = max(efficiency)
        return next(n for n, each in enumerate(efficiency, 1) if each >= 0.85 * best)
