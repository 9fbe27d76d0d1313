"""Markdown tables of comparisons, without the rows in which both sides are equal, or nearly.

Such rows are counted behind their table by where they come from; a note or a source that several
of the others have stands there once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from string import ascii_lowercase

NEAR = 0.1
"""Per cent that a row which is not listed may be off."""
OFTEN = 2
"""The number of rows with a note or source from which the text is moved below the table."""

_Row = list[str]


def folded(lines: Iterable[str]) -> Iterator[str]:
    """Yield ``lines`` with their tables folded."""
    table: list[_Row] = []
    for line in lines:
        if line.startswith("| "):
            table.append([cell.strip() for cell in line.strip()[1:-1].split(" | ")])
            continue
        yield from _told(table)
        table = []
        yield line
    yield from _told(table)


def _told(table: list[_Row]) -> Iterator[str]:
    """Yield a table, what is not listed in it, and what its letters and numbers mean."""
    header, rows = table[:1], table[2:]
    verdicts = [(row, _verdict(dict(zip(header[0], row, strict=True)))) for row in rows]
    listed = [row for row, verdict in verdicts if not verdict]
    meanings: dict[str, str] = {}
    if listed and header[0][-1] == "":
        meanings |= _labelled(listed, -1, (f"({letter})" for letter in ascii_lowercase))
    if "source" in (header[0] if header else ()):
        meanings |= _labelled(listed, header[0].index("source"), (f"[{at}]" for at in count(1)))
    if listed or not rows:
        yield from map(_line, (*table[:2], *listed))
    for verdict in dict.fromkeys(verdict for _, verdict in verdicts if verdict):
        of = Counter(_source(header[0], row) for row, told in verdicts if told == verdict)
        sources = "; ".join(
            f"{times} of {name}" if name else str(times) for name, times in of.items()
        )
        yield from ("", f"{verdict}, and not listed: {sources}.")
    if meanings:
        yield ""
    yield from (f"- {label} {meaning}" for label, meaning in meanings.items())


def _verdict(cells: dict[str, str]) -> str:
    """Return why a row is not listed; nothing where it is."""
    if "asserted at most" in cells:
        return "" if cells[""] else "Not above"
    if "peak reserved" in cells:  # programs against traces
        peaks = cells["peak allocated"], cells["peak reserved"]
        is_equal = cells["events equal"] == "all" and all(one.endswith(", equal") for one in peaks)
    else:
        is_equal = cells.get("simulated") == "equal" or cells.get("all equal") == "yes"
    if is_equal:
        return "Equal"
    off = cells.get("off", "").rstrip("%")
    return f"Within {NEAR} %" if off and abs(float(off)) <= NEAR else ""


def _source(header: Sequence[str], row: _Row) -> str:
    """Return where a row's number is from, as the table's own column says."""
    cells = dict(zip(header, row, strict=True))
    return cells.get("source", cells.get("GPU", ""))


def _labelled(rows: list[_Row], column: int, labels: Iterator[str]) -> dict[str, str]:
    """Put a label in place of what several rows have in a column; return the meanings."""
    found = Counter(row[column] for row in rows if row[column])
    named = {text: next(labels) for text, times in found.items() if times >= OFTEN}
    for row in rows:
        row[column] = named.get(row[column], row[column])
    return {label: text for text, label in named.items()}


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
