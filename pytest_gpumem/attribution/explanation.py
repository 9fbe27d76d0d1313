"""The lines of an explanation: sites, categories and numbers of blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_gpumem.attribution.history import OPTIMIZER_STATE, PARAMETERS
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import ELLIPSIS
from pytest_gpumem.values.operator_names import FUSED

SHOWN_LINES = 10
"""The most lines of an explanation that a failure prints; the JSON report has all of them."""

LEAST_TEXT = 12
"""The least width of a source line and of an operator in a narrow terminal."""

_JOINED = " + "
"""Separator of the operators that compiled code fuses into one kernel."""

_HELD_BY = "held by "
"""The text before the variable that keeps a block."""

_NAMESPACE = re.compile(r"^(?:torch\.|aten::|functional\.)(?=\w)")
"""Namespaces of operators."""

FOLDED = "one line of several"
"""Key of a merged line: the number of lines merged into it."""

Line = Mapping[str, Any]


def explanation_lines(
    explanation: Sequence[Line],
    *,
    signed: bool = True,
    every: bool = False,
    width: int | None = None,
) -> list[str]:
    """Return ``explanation`` in lines, aligned in columns, largest first.

    ``signed`` lines are differences. Unless ``every`` is set, the state of one optimizer and the
    allocations of one code line are merged into a line each, and lines beyond :data:`SHOWN_LINES`
    are summed up in a last one. If ``width`` is given, lines are fitted into that many columns.
    """
    lines = list(explanation) if every else folded(explanation)
    shown = lines if every else lines[:SHOWN_LINES]
    texts = _in_columns(shown, signed, width)
    while not every and len(texts) > SHOWN_LINES and len(shown) > 1:
        shown = shown[:-1]
        texts = _in_columns(shown, signed, width)
    if hidden := lines[len(shown) :]:
        total = sum(line["bytes"] for line in hidden)
        sign, kind = (_sign(total), "change") if signed else ("", "site")
        kind += "s" * (len(hidden) > 1)
        texts.append(f"  {sign}{format_size(abs(total))} in {len(hidden)} smaller {kind}")
    return texts


def _in_columns(lines: Sequence[Line], signed: bool, width: int | None) -> list[str]:
    """Return ``lines`` in columns; one that is too long takes two."""
    texts: list[str] = []
    # In a narrow terminal leave out the numbers of blocks, then the operators' namespaces.
    for blocks, prefixes in ((True, True), (False, True), (False, False)):
        rows = [_columns(line, signed, blocks=blocks, prefixes=prefixes) for line in lines]
        texts = _aligned(rows, None if prefixes else width)
        if width is None or max(map(len, texts), default=0) <= width:
            break
    return texts


def folded(explanation: Iterable[Line]) -> list[Line]:
    """Return ``explanation`` with merged lines, largest first.

    Lines on the state of one optimizer, and on one operator's blocks from one code line, are
    merged; growth and shrinkage are not.
    """
    groups: dict[object, list[Line]] = {}
    for index, line in enumerate(explanation):
        category, operator = line.get("category"), line.get("operator") or ""
        kind = category, line["bytes"] < 0, line.get("change"), line.get("held_by")
        key: object = (*kind, line["site"], operator) if line.get("site") else index
        if category == OPTIMIZER_STATE and "." in operator:
            key = (*kind, operator.partition(".")[0])
        groups.setdefault(key, []).append(line)
    lines = [_sum(group) if len(group) > 1 else group[0] for group in groups.values()]
    return sorted(lines, key=lambda line: -abs(line["bytes"]))


def _sum(group: Sequence[Line]) -> Line:
    first, total = group[0], sum(line["bytes"] for line in group)
    count = sum(line.get("count") or 1 for line in group)
    common = {}
    for key in ("each", "site", "module", "dtype"):
        values = {line.get(key) for line in group}
        common[key] = values.pop() if len(values) == 1 else None
    if not common["each"] or common["each"] * count != abs(total):
        common["each"] = None
    names = list(dict.fromkeys(line["operator"] for line in group if line.get("operator")))
    operator = names[0] if names else None
    if len(names) > 1:
        owner, dot, _ = names[0].partition(".")
        own = (name.removeprefix(owner + dot) for name in sorted(names))
        operator = f"{owner}{dot}{', '.join(own)}"
    merged = {"operator": operator, FOLDED: len(group)}
    return {**first, "bytes": total, "count": count, **common, **merged}


def _columns(line: Line, signed: bool, *, blocks: bool, prefixes: bool) -> tuple[str, ...]:
    """Return sign, size, category, place, operator and ``blocks`` of a line."""
    change = line["bytes"]
    category = line.get("category") or "other"
    operator = line.get("operator") or line.get("module")
    if category == PARAMETERS and line.get("module"):
        operator = line["module"]  # more precise than the operator that moved it to the device
    # A library's workspace has no source line: the library's name is shown there.
    places = [place for place in (line.get("site"), operator) if place]
    site, operator = [*places, "", ""][:2]
    parts = [_blocks(line, signed) if blocks else "", line.get("dtype") or ""]
    if not prefixes:
        operator = _JOINED.join(_NAMESPACE.sub("", name) for name in operator.split(_JOINED))
    if signed and line.get("change") in ("new", "gone"):
        parts.append(f"({line['change']})")
    if line.get("held_by"):
        parts.append(f"{_HELD_BY}{line['held_by']}")
    return (
        _sign(change) if signed else "",
        format_size(abs(change)),
        category,
        site,
        operator,
        " ".join(filter(None, parts)),
    )


def _blocks(line: Line, signed: bool) -> str:
    """Return the number of blocks, and their size if it is the same for all."""
    count = line.get("count") or 1
    # Lines of another origin have no data on single blocks.
    each = line["each"] if "each" in line else abs(line["bytes"]) // count
    if each is not None and each * count == abs(line["bytes"]):
        return f"{count} × {format_size(each)}"
    if signed and line.get("change") in ("grown", "shrunk") and FOLDED not in line:
        return f"in {count} block{'s' * (count > 1)}"
    return f"{count} block{'s' * (count > 1)}"


def _sign(change: int) -> str:
    return "-" if change < 0 else "+"


def _aligned(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return ``rows`` in columns; empty columns are left out."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        rows, widths = _fitted(rows, widths, width)
    lines: list[str] = []
    for sign, size, *texts in rows:
        front = f"  {sign}{size:>{widths[1]}}  "
        lines += _row(front, texts, widths[2:], width)
    return lines


def _row(front: str, texts: Sequence[str], widths: Sequence[int], width: int | None) -> list[str]:
    """Return a row as one line, or as two if an operator or a holder is too long."""
    for kept in (4, 3, 2):
        pairs = zip(texts[:kept], widths, strict=False)
        columns = [f"{text:<{w}}" for text, w in pairs if w or text]
        line = f"{front}{'  '.join(columns)}".rstrip()
        if width is None or len(line) <= width:
            break
    rest = "  ".join(filter(None, texts[kept:]))
    return [line, *([" " * len(front) + rest] if rest else [])]


def _fitted(
    rows: Sequence[Sequence[str]], widths: list[int], width: int
) -> tuple[list[list[str]], list[int]]:
    """Return ``rows`` with source lines shortened to fit, and the widths of columns.

    Operators and variables that are longer than their column are not shortened: they go to a
    separate line.
    """
    gaps = 2 * (1 + sum(map(bool, widths[2:])))
    blocks = max(len(row[5].partition(_HELD_BY)[0].rstrip()) for row in rows)
    room = width - gaps - sum(widths[:3]) - blocks
    # Most useful are the package and file of a path, and the whole name of an operator.
    shortest = max(len(_shortened_path(row[3], 0)) for row in rows)
    most = max(LEAST_TEXT, room - shortest)
    names = [_last(row[4], most) for row in rows]
    operator = max((len(name) for name in names if len(name) <= most), default=0)
    place = min(widths[3], max(LEAST_TEXT, room - operator))
    fitted = [
        [*row[:3], _shortened_path(row[3], place), name, *row[5:]]
        for row, name in zip(rows, names, strict=True)
    ]
    found = [max(map(len, column)) for column in zip(*fitted, strict=True)]
    return fitted, [*found[:4], operator, *found[5:]]


def _last(operators: str, width: int) -> str:
    """Return ``operators``; of fused ones, as many of the last ones as fit, but at least one."""
    names = operators.split(_JOINED)
    if len(names) > 1 and len(operators) > width:
        lasts = [_JOINED.join(names[first:]) for first in range(1, len(names))]
        for last in (*lasts, names[-1].removesuffix(FUSED)):
            if len(last) + 2 <= width:
                return f"{ELLIPSIS} {last}"
        return names[-1].removesuffix(FUSED)
    return operators


def _shortened_path(path: str, width: int) -> str:
    """Return ``path`` if it fits, else its package and file, else its end.

    A ``width`` of 0 gives the shortest form with a package.
    """
    if len(path) <= width:
        return path
    package, *folders, file = path.split("/") if "/" in path else ("", path)
    for first in range(1, len(folders) + 1):
        short = "/".join((package, "…", *folders[first:], file))
        if len(short) <= width or (not width and first == len(folders)):
            return short
    if not width:
        return path
    tail = path[len(path) - width + 1 :]
    return f"…{tail[tail.find('/') :]}" if "/" in tail else f"…{tail}"
