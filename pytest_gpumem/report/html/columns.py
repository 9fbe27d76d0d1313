"""Series of a million numbers in a page: each as numbers of its few different values, packed."""

from __future__ import annotations

import sys
import zlib
from array import array
from base64 import b64encode
from collections.abc import Iterable
from typing import Any

_WIDTHS = {1: "B", 2: "H", 4: "I"}
"""Bytes of a number, and what :mod:`array` calls it."""


class Columns:
    """Columns that stand in the page one after the other, as one packed text.

    What a program repeats stays a repetition: packed, a loop of a thousand steps is little larger
    than one of ten.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, values: Iterable[int]) -> dict[str, Any]:
        """Add ``values``; return how to read them: first byte, how many, how wide, and which."""
        numbers: dict[int, int] = {}
        ids = array("I", (numbers.setdefault(value, len(numbers)) for value in values))
        width = next(width for width in _WIDTHS if len(numbers) <= 256**width)
        column = array(_WIDTHS[width], ids)
        if sys.byteorder == "big":
            column.byteswap()
        # A browser reads wide numbers only where they are aligned.
        self._bytes += b"\0" * (-len(self._bytes) % 4)
        begin = len(self._bytes)
        self._bytes += column.tobytes()
        return {"begin": begin, "count": len(ids), "width": width, "values": list(numbers)}

    def packed(self) -> str:
        """Return all columns, deflated, as text that may stand in a page."""
        return b64encode(zlib.compress(bytes(self._bytes), 9)).decode("ascii")
