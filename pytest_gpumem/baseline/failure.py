"""A test's failure text: the cause, the verdicts, their explanation, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pytest_gpumem.baseline.telling import Told, told
from pytest_gpumem.baseline.verdict import Verdict
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import listed


def failure_text(
    verdicts: Iterable[Verdict], update: str, *, every: bool = False, width: int | None = None
) -> str:
    """Return a test's failure text: its cause, each statement, then each remedy once.

    ``update`` is the command line that records the test's numbers. The first statement has the
    lines that explain it; those of the others are shown if ``every`` is set. ``every`` and
    ``width`` are those of :func:`~pytest_gpumem.baseline.explanation.explanation_lines`.
    """
    verdicts = list(verdicts)
    lines = list(statement_lines(verdicts, every=every, width=width))
    remedies = [line for verdict in verdicts for line in verdict.remedy(update)]
    return "\n".join([*lines, *dict.fromkeys(remedies)])


def statement_lines(
    broken: Sequence[Verdict], *, every: bool = False, width: int | None = None
) -> Iterator[str]:
    """Yield the cause of a failure, then its statements, of which the first one is explained."""
    said: set[str] = set()
    shown = False
    for one in told(broken):
        verdict = one.verdict
        if verdict.cause and verdict.cause not in said:
            said.add(verdict.cause)
            yield verdict.cause
        yield verdict.short
        why = verdict.explanation_lines(every=every, width=width)
        if why and (every or not shown):
            shown = True
            yield from why
        yield from _of_phases(one, every=every, width=width)


def brief_text(verdicts: Sequence[Verdict]) -> str:
    """Return in a few words a test's excess, by its representative verdict."""
    return told(verdicts)[0].verdict.brief


def _of_phases(one: Told, *, every: bool, width: int | None) -> Iterator[str]:
    """Yield the excess of the phases in one line; with their own lines if ``every`` is set."""
    if every:
        for other in one.others:
            yield other.short
            yield from other.explanation_lines(every=True, width=width)
        return
    if not one.others:
        return
    groups: dict[tuple[int, bool], list[str]] = {}
    for other in one.others:
        key = abs(other.excess), other.excess > 0
        groups.setdefault(key, []).append(other.phase or "the test")
    yardstick = one.verdict.kind
    parts = []
    for (nbytes, over), names in groups.items():
        side = "over" if over else "under"
        same = "the same " if abs(one.verdict.excess) == nbytes else ""
        parts.append(f"{listed(names)}: {same}{format_size(nbytes)} {side}")
    own = "their baselines" if len(one.others) > 1 else "its baseline"
    if yardstick == "prediction":
        own = own.replace("baseline", "prediction")
    yield f"{', '.join(parts)} {own}"
