"""Styled lines of text, made without a terminal, so that they can be tested without one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from pytest_gpumem.quoting import printable

if TYPE_CHECKING:
    from _pytest._io import TerminalWriter

ELLIPSIS = "…"


@dataclass(frozen=True)
class TextRun:
    """A piece of a line; ``style`` has words such as ``bold red``, and is empty for plain text."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Line:
    """A line of a terminal, without its end."""

    spans: tuple[TextRun, ...] = ()

    @classmethod
    def of(cls, text: str, style: str = "") -> Line:
        """Return a line in one style."""
        return cls((TextRun(text, style),))

    @property
    def text(self) -> str:
        """The line without its styles."""
        return "".join(span.text for span in self.spans)


def write_lines(writer: TerminalWriter, lines: Iterable[Line]) -> None:
    """Write ``lines`` in their styles; the writer omits colours if the terminal has none."""
    for line in lines:
        for span in line.spans:
            # pytest's name for dim is light.
            markup = dict.fromkeys(span.style.replace("dim", "light").split(), True)
            writer.write(printable(span.text), **markup)
        writer.line()


def cells(text: str) -> int:
    """Return the width of ``text`` in terminal columns: two for a wide character."""
    if text.isascii():
        return len(text)
    return sum(_cell(char) for char in text)


def _cell(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def shorten(text: str, width: int) -> str:
    """Return ``text`` in at most ``width`` columns, with an ellipsis for omitted characters.

    The middle is omitted, because similar tests' names differ at the ends. Control characters are
    escaped.
    """
    text = printable(text)
    if cells(text) <= width:
        return text
    if width < 1:
        return ""
    tail = _fitting(text[::-1], (width - 1) // 2)[::-1]
    head = _fitting(text, width - 1 - cells(tail))
    return f"{head}{ELLIPSIS}{tail}"


def _fitting(text: str, width: int) -> str:
    return text[: sum(used <= width for used in accumulate(map(_cell, text)))]


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return ``text`` padded to ``width`` columns, aligned to the right if requested."""
    gap = " " * (width - cells(text))
    return gap + text if right else text + gap


def wrap(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Return ``text`` wrapped between words in lines of ``width`` columns.

    A number stays with its unit. The first line begins with ``first``, the others with ``rest``.
    Control characters are escaped.
    """
    words = re.split(r"(?<!\d)\s+|\s+(?!(?:[KMGT]i)?B\b|%)", printable(text.strip()))
    return pack(filter(None, words), width, gap=" ", first=first, rest=rest)


def pack(
    items: Iterable[str], width: int, *, gap: str = "  ", first: str = "", rest: str = ""
) -> list[str]:
    """Return ``items``, ``gap`` between them, in as few lines of ``width`` columns as they need."""
    lines: list[str] = []
    current, empty = first, True
    for item in items:
        joined = current + item if empty else current + gap + item
        if not empty and cells(joined) > width:
            lines.append(current)
            joined = rest + item
        current, empty = joined, False
    return lines if empty else [*lines, current]


def listed(names: Sequence[str]) -> str:
    """Return ``names`` as a sentence lists them."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def counted(count: int, noun: str) -> str:
    """Return ``1 test`` or ``2 tests``."""
    return f"{count} {noun}{'s' * (count != 1)}"
