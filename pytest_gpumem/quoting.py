"""Users' input repeated in messages: visible, on one line and of bounded length."""

from __future__ import annotations

import os
import shlex

MOST = 200
"""The most characters that are repeated of a value."""


def printable(text: str, most: int | None = None) -> str:
    """Return ``text`` with characters that a terminal would not show escaped.

    Control sequences, line ends and marks that change the direction of writing are escaped,
    ``\\x1b`` or ``\\u202e``. With ``most``, the middle of a longer text is left out.
    """
    if most is not None:
        text = shortened(text, most)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def quoted_for_shell(text: str) -> str:
    """Return ``text`` as one word for a shell, always in quotes."""
    if os.name == "nt":
        from subprocess import list2cmdline

        line = list2cmdline([text])
        return line if line.startswith('"') else f'"{line}"'
    if "!" in text:  # history expansion, also in double quotes
        return shlex.quote(text)
    return '"' + "".join(f"\\{char}" if char in '\\"$`' else char for char in text) + '"'


def quoted(value: object) -> str:
    """Return ``repr(value)``, without its middle where that is longer than :data:`MOST`."""
    if isinstance(value, str):
        value = shortened(value, MOST)
    try:
        text = repr(value)
    except Exception:  # raised by the __repr__ of a user's class
        text = f"<{type(value).__name__}>"
    return printable(text, 2 * MOST)


def shortened(text: str, most: int) -> str:
    """Return ``text`` in at most ``most`` characters; the middle has the number of omitted ones."""
    if len(text) <= most:
        return text
    gap = f" ... {len(text) - most:,} characters ... "
    head = max(most - len(gap), 0)
    tail = head // 3
    return f"{text[: head - tail]}{gap}{text[len(text) - tail :]}"
