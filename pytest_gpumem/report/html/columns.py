"""Series of a million numbers in a page, packed: every number exact, few bytes for each."""

from __future__ import annotations

import sys
import zlib
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any

_WIDTHS = {1: "B", 2: "H", 4: "I"}
"""Bytes of a number, and its type code in :mod:`array`."""
_EXACT = 8
"""Bytes of a float, a browser's only number, which holds 2^53 bytes exactly."""


class Columns:
    """Columns of numbers in the page, one after the other, as one packed text.

    Repeated events stay repeated data: packed, a loop of a thousand steps is little larger
    than one of ten.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, values: Iterable[int]) -> dict[str, int]:
        """Add ``values`` as indices of the distinct ones; return how to read them.

        ``begin`` is where the ``count`` numbers of ``width`` bytes begin, and ``values`` is where
        the ``distinct`` values that they stand for do, each a float.
        """
        numbers: dict[int, int] = {}
        ids = [numbers.setdefault(value, len(numbers)) for value in values]
        told = self.add_small(ids)
        begin = self._append(array("d", numbers), _EXACT)
        return {**told, "values": begin, "distinct": len(numbers)}

    def add_small(self, values: Sequence[int]) -> dict[str, int]:
        """Add ``values`` from 0 to 2^32 - 1 as they are; return how to read them."""
        most = max(values, default=0)
        width = next(width for width in _WIDTHS if most < 256**width)
        begin = self._append(array(_WIDTHS[width], values), width)
        return {"begin": begin, "count": len(values), "width": width}

    def packed(self) -> str:
        """Return all columns, deflated, as text for a page."""
        return b64encode(zlib.compress(bytes(self._bytes), 6)).decode("ascii")

    def _append(self, column: array[Any], width: int) -> int:
        if sys.byteorder == "big":
            column.byteswap()
        # A browser reads wide numbers only where they are aligned.
        self._bytes += b"\0" * (-len(self._bytes) % width)
        begin = len(self._bytes)
        self._bytes += column.tobytes()
        return begin
