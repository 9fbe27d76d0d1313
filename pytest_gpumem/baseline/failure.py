"""A test's failure: its statements, the representative one first, and their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_gpumem.baseline.verdict import Verdict
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import listed

_RANKS = {"nothing_measured": 0, "ran_eagerly": 1, "baseline": 2, "prediction": 2, "leak": 2}
"""Ranks of kinds of verdicts: those that invalidate the numbers come first, a plain limit last."""
_LIMIT, _MISSING = 3, 4


@dataclass(frozen=True)
class FailureStatement:
    """A statement of a failure: its verdict, and those of phases that belong to it."""

    verdict: Verdict
    others: tuple[Verdict, ...] = ()

    @property
    def rank(self) -> tuple[int, int, bool]:
        """The sort key: by kind of verdict, then by excess, the whole test's before a phase's."""
        verdict = self.verdict
        rank = _RANKS.get(verdict.kind, _LIMIT)
        if verdict.kind == "baseline" and verdict.limit is None:
            rank = _MISSING
        return rank, -abs(verdict.excess), verdict.phase is not None


def failure_statements(broken: Iterable[Verdict]) -> list[FailureStatement]:
    """Return the statements of a failure, the representative one first.

    Comparisons of one kind with stored or predicted numbers are one statement, the whole test's:
    those of its phases only add their numbers.
    """
    kinds: dict[tuple[str, str], list[Verdict]] = {}
    single = []
    for one in broken:
        if one.reference is not None and one.limit is not None and not one.did_not_run:
            kinds.setdefault((one.kind, one.device), []).append(one)
        else:
            single.append(FailureStatement(one))
    statements = []
    for group in kinds.values():
        first = min(group, key=lambda one: (one.phase is not None, -abs(one.excess)))
        others = tuple(one for one in group if one is not first)
        statements.append(FailureStatement(first, others))
    # Of equals a comparison is first: it explains the bytes.
    return sorted([*statements, *single], key=lambda statement: statement.rank)


def main_verdict(broken: Iterable[Verdict]) -> Verdict:
    """Return the representative verdict of a failure."""
    return failure_statements(broken)[0].verdict


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
    causes: set[str] = set()
    explained = False
    for statement in failure_statements(broken):
        verdict = statement.verdict
        if verdict.cause and verdict.cause not in causes:
            causes.add(verdict.cause)
            yield verdict.cause
        yield verdict.short
        why = verdict.explanation_lines(every=every, width=width)
        if every or not explained:
            explained = explained or bool(why)
            yield from why
        if every:
            for other in statement.others:
                yield other.short
                yield from other.explanation_lines(every=True, width=width)
        elif statement.others:
            yield _phases_line(statement)


def _phases_line(statement: FailureStatement) -> str:
    """Return the excess of a statement's phases in one line."""
    groups: dict[tuple[int, str], list[str]] = {}
    for other in statement.others:
        key = abs(other.excess), "over" if other.excess > 0 else "under"
        groups.setdefault(key, []).append(other.phase or "the test")
    parts = []
    for (nbytes, side), names in groups.items():
        same = "the same " if abs(statement.verdict.excess) == nbytes else ""
        parts.append(f"{listed(names)}: {same}{format_size(nbytes)} {side}")
    yardstick = "prediction" if statement.verdict.kind == "prediction" else "baseline"
    own = f"their {yardstick}s" if len(statement.others) > 1 else f"its {yardstick}"
    return f"{', '.join(parts)} {own}"
