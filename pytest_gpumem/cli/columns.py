"""Tables that fit the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

from pytest_gpumem.echo import printable

GAP = "  "
UNLIMITED = 1 << 20
"""Columns of a file or a pipe."""


def terminal_width() -> int:
    """Return the columns of the terminal; output to a file is never cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED


def say(lines: Iterable[str]) -> None:
    """Print ``lines``; control characters in names are shown and not obeyed."""
    for line in lines:
        print(printable(line.rstrip()))


def table(
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int],
    given_up: Sequence[int] = (),
    width: int = UNLIMITED,
) -> Iterator[str]:
    """Yield ``rows`` in columns, those in ``left`` aligned to the left.

    In a terminal too narrow, the columns ``given_up`` are left out, first to last, as needed.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    kept = set(range(len(widths)))
    for index in given_up:
        if sum(widths[one] + len(GAP) for one in kept) - len(GAP) > width:
            kept.discard(index)
    for row in rows:
        cells = (
            cell.ljust(widths[index]) if index in left else cell.rjust(widths[index])
            for index, cell in enumerate(row)
            if index in kept
        )
        yield GAP.join(cells).rstrip()
