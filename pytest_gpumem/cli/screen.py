"""Repeated output of a command, in place, until it is interrupted."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from pytest_gpumem.text import shorten

# ECMA-48 and xterm's private modes, which tmux and screen support too.
_ENTER = "\x1b[?1049h\x1b[?25l"
"""Switch to the alternate screen, without a cursor."""
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def frame(lines: Sequence[str], columns: int, rows: int) -> str:
    """Return the text that paints ``lines`` over a terminal of that size.

    Nothing is cleared before it is written again, so nothing flickers; what does not fit is left
    out, and the last row reports that.
    """
    shown = [shorten(line, columns) for line in lines]
    if len(shown) > rows:
        hidden = len(shown) - rows + 1
        shown = [*shown[: rows - 1], shorten(f"... {hidden} more lines", columns)]
    return _HOME + "\r\n".join(line + _END_OF_LINE for line in shown) + _END_OF_SCREEN


def watch(
    lines: Callable[[], Sequence[str]],
    seconds: float,
    *,
    out: TextIO | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show ``lines`` again every ``seconds`` until Ctrl-C, and restore the terminal.

    A file or a pipe gets them one time after the other.
    """
    out = out or sys.stdout
    with suppress(KeyboardInterrupt):
        if not out.isatty():
            while True:
                print(*lines(), sep="\n", flush=True, file=out)
                sleep(seconds)
        out.write(_ENTER)
        try:
            while True:
                found = lines()
                out.write(frame(found, *shutil.get_terminal_size()))
                out.flush()
                sleep(seconds)
        finally:
            out.write(_LEAVE)
            out.flush()
