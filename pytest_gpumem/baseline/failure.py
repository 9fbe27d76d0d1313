"""What a test fails with: its verdicts, what explains them, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_gpumem.baseline.verdict import Verdict
from pytest_gpumem.sizes import format_size


def failure_text(
    verdicts: Iterable[Verdict], update: str, *, every: bool = False, width: int | None = None
) -> str:
    """Return what a test fails with: each verdict's text, then each remedy once.

    ``update`` is the command line that records the test's numbers. What explains several verdicts
    stands once, below the first: phases that differ as the whole test does are one line. Where a
    baseline's difference is explained, the limit of the same peak needs no list of its own.
    ``every`` and ``width`` are those of
    :func:`~pytest_gpumem.baseline.explanation.explanation_lines`.
    """
    verdicts = list(verdicts)
    explained = {v.phase for v in verdicts if v.kind == "baseline" and v.explanation}
    lines: list[str] = []
    shown: set[str] = set()
    for group in _groups(verdicts):
        first = group[0]
        lines.append(first.short)
        why = first.explanation_lines(every=every, width=width)
        if first.kind != "limit" or first.phase not in explained:
            if "\n".join(why) not in shown:
                lines += why
            elif why:
                lines.append("  as above")
            shown.add("\n".join(why))
        lines += _alike(group)
    remedies = [line for verdict in verdicts for line in verdict.remedy(update)]
    return "\n".join([*lines, *dict.fromkeys(remedies)])


def brief_text(verdicts: Sequence[Verdict]) -> str:
    """Return in a few words by how much a test is over: of the verdict that stands for all."""
    return verdicts[0].brief


def _groups(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """Return ``verdicts`` with those that differ by the same bytes of the same blocks together."""
    groups: dict[object, list[Verdict]] = {}
    for index, verdict in enumerate(verdicts):
        alike = verdict.reference is not None and verdict.explanation and verdict.actual
        key = (verdict.kind, verdict.device, verdict.excess, verdict.explanation, verdict.notes)
        groups.setdefault(str(key) if alike else index, []).append(verdict)
    return list(groups.values())


def _alike(group: Sequence[Verdict]) -> list[str]:
    if len(group) < 2:
        return []
    names = [verdict.phase or "the test" for verdict in group[1:]]
    first = group[0]
    side, yardstick = "over" if first.excess > 0 else "under", first.kind
    size, own = format_size(abs(first.excess)), "their" if len(names) > 1 else "its"
    plural = "s" if len(names) > 1 else ""
    return [f"{listed(names)}: the same {size} {side} {own} {yardstick}{plural}"]


def listed(names: Sequence[str]) -> str:
    """Return ``names`` as a sentence lists them."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
