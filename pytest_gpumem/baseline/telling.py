"""The choice of a test's representative failed verdict, and of those that repeat it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_gpumem.baseline.verdict import Verdict

_RANKS = {"nothing_measured": 0, "ran_eagerly": 1, "baseline": 2, "prediction": 2, "leak": 2}
"""Ranks of kinds of verdicts: those that invalidate the numbers come first, a plain limit last."""
_LIMIT, _MISSING = 3, 4


@dataclass(frozen=True)
class Told:
    """A statement of a failure: its verdict, and those of phases that belong to it."""

    verdict: Verdict
    others: tuple[Verdict, ...] = ()


def told(broken: Iterable[Verdict]) -> list[Told]:
    """Return the statements of a failure, the representative one first.

    Within a kind, the whole test's precedes those of its phases, which only add their numbers.
    """
    kinds: dict[tuple[str, str], list[Verdict]] = {}
    apart: list[Told] = []
    for verdict in broken:
        if _is_comparison(verdict):
            kinds.setdefault((verdict.kind, verdict.device), []).append(verdict)
        else:
            apart.append(Told(verdict))
    return sorted([*map(_of_one_kind, kinds.values()), *apart], key=_place)


def chief(broken: Sequence[Verdict]) -> Verdict:
    """Return the representative verdict of a failure."""
    return told(broken)[0].verdict


def _is_comparison(verdict: Verdict) -> bool:
    """Return whether it compares a number with a stored or predicted one."""
    known = verdict.reference is not None and verdict.limit is not None
    return known and not verdict.did_not_run


def _of_one_kind(verdicts: Sequence[Verdict]) -> Told:
    first = min(verdicts, key=lambda one: (one.phase is not None, -abs(one.excess)))
    return Told(first, tuple(one for one in verdicts if one is not first))


def _place(one: Told) -> tuple[int, int, bool]:
    verdict = one.verdict
    rank = _RANKS.get(verdict.kind, _LIMIT)
    if verdict.kind == "baseline" and verdict.limit is None:
        rank = _MISSING
    return rank, -abs(verdict.excess), verdict.phase is not None
