"""A command's progress on a terminal, shown after two seconds and removed at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

DELAY, INTERVAL = 2.0, 0.5
"""The seconds before the bar is shown, and between two updates of its time."""

_TIME = "{desc}: {elapsed}"
_SHARE = "{desc} |{bar:24}| {n} of {total}, {elapsed}"


class Progress:
    """The progress bar of a command; without a bar, if stderr is no terminal, nothing is shown."""

    def __init__(self, bar: tqdm[None] | None = None) -> None:
        self._bar = bar

    def expect(self, total: int) -> None:
        """Set the total number of steps; before that, only the time is shown."""
        if self._bar is not None:
            self._bar.total, self._bar.bar_format = total, _SHARE

    def step(self) -> None:
        """Count one step as done."""
        if self._bar is not None:
            self._bar.update()

    def say(self, line: str, out: TextIO) -> None:
        """Print ``line`` to ``out``, above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=out)
        else:
            print(line, file=out, flush=True)


NOTHING_SHOWN = Progress()


@contextmanager
def progress(name: str) -> Iterator[Progress]:
    """Show the progress of the command ``name``, which runs inside."""
    if not sys.stderr.isatty():
        yield Progress()
        return
    from tqdm import tqdm

    with tqdm(desc=name, delay=DELAY, leave=False, file=sys.stderr, bar_format=_TIME) as bar:
        done = Event()

        def tick() -> None:
            """Update the time while no step is done."""
            wait = DELAY
            while not done.wait(wait):
                bar.refresh()
                wait = INTERVAL

        ticking = Thread(target=tick, daemon=True)
        ticking.start()
        try:
            yield Progress(bar)
        finally:
            done.set()
            ticking.join()
