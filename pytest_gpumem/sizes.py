"""Sizes and tolerances: parsing and formatting.

``K M G T`` and ``KiB MiB GiB TiB`` are powers of 1024, ``KB MB GB TB`` powers of 1000.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass

from pytest_gpumem.quoting import quoted

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

ALLOCATOR_BLOCK = 512
"""Bytes; the CUDA caching allocator rounds every request up to a multiple (kMinBlockSize)."""

SIZE_FORM = (
    'bytes as an int, or a text such as "512", "2GB" (powers of 1000), "2GiB" or "2G" (1024)'
)
TOLERANCE_FORM = '"2% + 1MiB", "1%", "1MiB" or bytes as an int'

_UNITS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}

_MOST = 1 << 128
"""More bytes than any text can give: Python does not print ints of thousands of digits."""

# The number of digits is limited so that a mistyped value never exceeds Python's limit for int().
# Patterns are compiled at first use: every pytest run imports this module, few parse a size.
_NUMBER = r"([0-9]{1,18})(?:\.([0-9]{1,18}))?"
_SIZE = rf"\s*{_NUMBER}\s*([A-Za-z]*)\s*"
_PERCENT = rf"\s*{_NUMBER}\s*%\s*"


class Size(int):
    """A number of bytes with the text that it was written as."""

    written: str
    """The text, without the space around it: ``300KB``."""

    def __new__(cls, value: int, written: str) -> Size:
        """Return ``value`` bytes with the text ``written``."""
        size = super().__new__(cls, value)
        size.written = written
        return size

    def __reduce__(self) -> tuple[type[Size], tuple[int, str]]:
        """Return the constructor and arguments for :mod:`copy` and :mod:`pickle`."""
        return Size, (int(self), self.written)


def written_size(value: int | str) -> int:
    """Return :func:`parse_size`'s bytes, with their text where it has a unit."""
    size = parse_size(value)
    named = isinstance(value, str) and not value.strip().isdigit()
    return Size(size, str(value).strip()) if named else size


def in_words(size: int) -> str:
    """Return the text that the user wrote for ``size``; empty if it is in KB, MB or GB.

    Reports use KiB, MiB and GiB, so that KB, MB and GB would be confusing.
    """
    written: str = getattr(size, "written", "")
    return "" if is_decimal(written) else written


def is_decimal(written: str) -> bool:
    """Return whether a size is in powers of 1000: ``300KB``, not ``300KiB`` nor ``300K``."""
    return written.lower().endswith(("kb", "mb", "gb", "tb"))


def parse_size(value: int | str) -> int:
    """Return the bytes of ``value``, fractions of a byte rounded down.

    Units are read in any case, with or without a space before them; a bare number is bytes. Raises
    ``ValueError`` for anything else: negative numbers, bools, floats, other units.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST:
        return int(value)
    if isinstance(value, str) and (match := re.fullmatch(_SIZE, value)):
        whole, fraction, unit = match.groups(default="")
        if (factor := _UNITS.get(unit.lower())) is not None:
            scale: int = 10 ** len(fraction)
            return int(whole + fraction) * factor // scale
    raise ValueError(f"{quoted(value)} is not a size; write {SIZE_FORM}")


_READ = (("KiB", 1), ("MiB", 1), ("GiB", 2), ("TiB", 2))
"""The units in which sizes are shown, and the number of digits after the point."""


def format_size(n: int, *, more: int = 0) -> str:
    """Return ``n`` bytes for reading: ``1.62 GiB``, ``-512 B``; ``more`` digits than usual."""
    sign, size = ("-", -n) if n < 0 else ("", n)
    if size < KIB:
        return f"{sign}{size} B"
    text = ""
    for unit, digits in _READ:
        factor, places = _UNITS[unit.lower()], digits + more
        scale: int = 10**places
        # Rounded before the unit is chosen, else 1 GiB less one byte would be "1024.0 MiB".
        rounded = (2 * size * scale + factor) // (2 * factor)
        text = f"{sign}{rounded // scale}.{rounded % scale:0{places}} {unit}"
        if rounded < KIB * scale:
            break
    return text


def format_change(n: int) -> str:
    """Return the size of a change of ``n`` bytes with its sign: ``+512 B``, ``0 B``."""
    return f"{'+' if n > 0 else ''}{format_size(n)}"


def format_apart(a: int, b: int) -> tuple[str, str]:
    """Return two sizes for display side by side, with as many digits as distinguish them.

    Exact bytes are used if more digits do not distinguish them; equal sizes give equal texts.
    """
    for more in range(4):  # with more than three further digits, bytes are clearer
        texts = tuple(format_size(n, more=more) for n in (a, b))
        if a == b or texts[0] != texts[1]:
            return texts[0], texts[1]
    return f"{a:,} B", f"{b:,} B"


def format_exact(n: int) -> str:
    """Return ``n`` bytes for comparing: ``1.62 GiB (1,739,461,632 B)``; below 1 KiB ``512 B``."""
    return exactly(format_size(n), n)


def exactly(text: str, n: int) -> str:
    """Return ``text``, a form of ``n`` bytes, with the exact bytes added if it lacks them."""
    exact = f"{n:,} B"
    return text if text == exact else f"{text} ({exact})"


@dataclass(frozen=True)
class Tolerance:
    """The tolerance above a reference: ``percent`` of it plus ``floor`` bytes.

    Raises ``ValueError`` when a part is negative or not a finite number.
    """

    percent: float
    floor: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.percent) or self.percent < 0 or self.floor < 0:
            raise ValueError(
                f"{self.percent!r} % + {self.floor!r} B is not a tolerance; write {TOLERANCE_FORM}"
            )

    def allowance(self, reference: int) -> int:
        """Return the bytes by which a number may exceed ``reference`` (bytes), none below 0.

        A percentage without a floor allows at least one block, the resolution of the allocator.
        """
        from decimal import Decimal

        # The shortest decimal form of the float is the user's text, and its ratio is exact.
        numerator, denominator = Decimal(repr(self.percent)).as_integer_ratio()
        share = numerator * max(reference, 0) // (denominator * 100)
        if self.percent and not self.floor:
            return max(share, ALLOCATOR_BLOCK)
        return share + self.floor

    def __str__(self) -> str:
        """Return the written form, ``1% + 1MiB``, which :func:`parse_tolerance` reads."""
        from decimal import Decimal

        percent = format(Decimal(repr(self.percent)), "f")
        if "." in percent:
            percent = percent.rstrip("0").rstrip(".")
        # The exact floor, in the largest unit in which it is a whole number.
        units = ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB", "B")
        unit = next(unit for unit in units if self.floor % _UNITS[unit.lower()] == 0)
        floor = f"{self.floor // _UNITS[unit.lower()]}{unit}"
        parts = [f"{percent}%"] * bool(self.percent) + [floor] * bool(self.floor)
        return " + ".join(parts) or "0"


def parse_tolerance(value: int | str) -> Tolerance:
    """Return the tolerance of the text ``value``: ``"2% + 1MiB"``, ``"1%"``, ``"1MiB"``, ``0``.

    Raises ``ValueError`` for anything else.
    """
    with suppress(ValueError):
        if not isinstance(value, str):
            return Tolerance(0.0, parse_size(value))
        parts = value.split("+")
        percents = [found for part in parts if (found := re.fullmatch(_PERCENT, part))]
        sizes = [part for part in parts if not re.fullmatch(_PERCENT, part)]
        if len(percents) <= 1 and len(sizes) <= 1:
            percent = float(".".join(percents[0].groups(default="0"))) if percents else 0.0
            return Tolerance(percent, parse_size(sizes[0]) if sizes else 0)
    raise ValueError(f"{quoted(value)} is not a tolerance; write {TOLERANCE_FORM}")
