"""``gpumem gpus``: the GPUs of this host, the holders of their memory, and waiting tests."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from pytest_gpumem.cli import gpu_lines, running
from pytest_gpumem.cli.columns import terminal_width
from pytest_gpumem.cli.command import Answer, Command, argument
from pytest_gpumem.text import shorten


def run(arguments: argparse.Namespace) -> Answer | int:
    """Show the GPUs once, or repeatedly and with the tests that pytest runs."""
    if arguments.watch is None:
        if arguments.once:
            raise ValueError("--once goes with --watch; without it there is one look already")
        return look()
    from pytest_gpumem.sharing.database import default_folder
    from pytest_gpumem.sharing.watched import watching

    folder = default_folder()

    def text() -> list[str]:
        return running.look(folder).texts(as_json=arguments.json)

    with suppress(KeyboardInterrupt), watching(folder):
        if arguments.once:
            time.sleep(arguments.watch)
            print(*text(), sep="\n")
        else:
            watch(text, arguments.watch)
    return 0


def look() -> Answer:
    """Return the present state of the GPUs."""
    devices, trouble = gpu_lines.found()
    return Answer(
        gpu_lines.lines(devices, trouble, terminal_width()),
        lambda: {"devices": devices, "nvml": trouble},
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


COMMAND = Command(
    description="Show each GPU of this host, how it is divided, how busy it is, what processes "
    "hold of it, the tests that share it under --gpumem-share and those that wait; with --watch "
    "also, for each running pytest, the test that it runs and what the last one took. A run is "
    "seen from the first test that begins after this.",
    run=run,
    arguments=(
        argument(
            "--watch",
            nargs="?",
            type=_seconds,
            const=1.0,
            metavar="SECONDS",
            help="again and again until Ctrl-C, every second if no other time is given",
        ),
        argument(
            "--once", action="store_true", help="with --watch: look once, after that time, and end"
        ),
    ),
    looks=True,
    json="as JSON, a line for each look; sizes in bytes",
    examples=("gpumem gpus --watch",),
)


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
