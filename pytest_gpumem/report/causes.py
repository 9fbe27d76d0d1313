"""Groups of failures with one cause, and their texts, the same for every report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpumem.attribution.explanation import folded
from pytest_gpumem.baseline.verdict import Verdict, main_verdict
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import format_change

CHIEFLY = 0.8
"""The part of a change whose lines identify the cause, if there is no sentence on it: failures with
these lines in common have one cause, and other lines may explain the remaining fifth."""

UNEXPLAINED = {
    "limit": "over a limit",
    "leak": "memory left behind",
    "baseline": "over a baseline",
    "prediction": "not as predicted",
    "nothing_measured": "nothing was measured",
    "ran_eagerly": "compiled code ran eagerly",
}
OTHER = "failed for another reason than memory"

_AMOUNTS = re.compile(
    r"\d[\d.,]* (?:[KMGT]iB|B)\b|\d+ × |\(\d[\d, ]*,?\)|\b\d+(?= (?:more|forward))"
)
"""The parts of a sentence that differ between tests of one cause: sizes, counts and shapes."""


@dataclass(frozen=True)
class Cause:
    """The common cause of several failures."""

    words: tuple[str, ...]
    """A sentence, or the change and its source line."""
    records: tuple[TestRecord, ...]
    excesses: tuple[int, ...] = ()
    """Bytes by which each test is over, negative if under; empty without numbers."""

    @property
    def size(self) -> str:
        """``+32.0 MiB`` or, where tests differ, ``+32.0 MiB to +128.0 MiB``; the largest last."""
        known = sorted(self.excesses, key=abs)
        return " to ".join(dict.fromkeys(map(format_change, [*known[:1], *known[-1:]])))

    @property
    def largest(self) -> int:
        """The bytes of the largest excess."""
        return max(map(abs, self.excesses), default=0)


def causes_of(records: Iterable[TestRecord]) -> list[Cause]:
    """Return the causes of failures, the largest excess first, causes other than memory last.

    The excess of a test that ran out of memory is the missing bytes.
    """
    failed = [record for record in records if record.outcome in ("failed", "error")]
    groups = alike([_keys(record) for record in failed])
    found = [_cause(tuple(failed[index] for index in group)) for group in groups]
    found.sort(key=lambda one: (one.words == (OTHER,), -one.largest, -len(one.records), one.words))
    return found


def keys_of(broken: Sequence[Verdict]) -> list[object]:
    """Return the keys of a failure's causes; failures with a common key have the same cause.

    The keys are changes with their source lines, and the sentence on the reason.
    """
    first = main_verdict(broken)
    compared = first.limit is None, first.reference is None, first.excess > 0
    kind = first.kind, first.metric, first.phase, first.device, *compared
    sentence = [(*kind, _AMOUNTS.sub("…", first.cause))] if first.cause else []
    places = places_of(first)
    return [*([(*kind, places)] if places or not sentence else []), *sentence]


def alike(keys: Sequence[Sequence[object]]) -> list[list[int]]:
    """Return the positions of ``keys`` in groups: those with a common key are in one group."""
    groups: list[list[int]] = []
    known: dict[object, list[int]] = {}
    for position, own in enumerate(keys):
        group = next((known[key] for key in own if key in known), [])
        if not group:
            groups.append(group)
        group.append(position)
        for key in own:
            known.setdefault(key, group)
    return groups


def places_of(verdict: Verdict, *, every: bool = False) -> frozenset[tuple[Any, ...]]:
    """Return the changes with their source lines; without ``every``, only the main ones."""
    lines = folded(verdict.explanation)
    if not every and verdict.reference is not None:
        lines = list(_main_changes(lines, verdict.excess))
    keys = ("change", "category", "site", "operator")
    return frozenset(tuple(line.get(key) for key in keys) for line in lines)


def _main_changes(lines: Sequence[Mapping[str, Any]], excess: int) -> Iterator[Mapping[str, Any]]:
    """Yield the largest changes with the sign of ``excess``, which make :data:`CHIEFLY` of it.

    Small changes, such as rounding by the allocator in one test only, are no separate cause.
    """
    same = [line for line in lines if (line["bytes"] > 0) == (excess > 0)]
    left = CHIEFLY * sum(abs(line["bytes"]) for line in same)
    for line in same:
        if left > 0:
            yield line
        left -= abs(line["bytes"])


def _keys(record: TestRecord) -> list[object]:
    if record.ran_out:
        facts = record.out_of_memory or {}
        return [("out of memory", facts.get("site"), facts.get("operator"))]
    return keys_of(record.broken) if record.failed else [OTHER]


def _cause(records: tuple[TestRecord, ...]) -> Cause:
    first = records[0]
    if first.ran_out:
        facts = first.out_of_memory or {}
        site, operator = facts.get("site"), facts.get("operator")
        at, by = f" at {site}" if site else "", f" in {operator}" if operator else ""
        words = f"ran out of memory{at}{f' ({operator})' if site and operator else by}"
        words += f": {facts['cause']}" if facts.get("cause") else ""
        return Cause((words,), records, tuple(record.missing for record in records))
    if not first.failed:
        return Cause((OTHER,), records)
    verdicts = [main_verdict(record.broken) for record in records]
    excesses = tuple(one.excess for one in verdicts if one.limit is not None or one.reference)
    return Cause(tuple(_words(verdicts)), records, excesses)


def _words(verdicts: Sequence[Verdict]) -> Iterator[str]:
    first = verdicts[0]
    if first.cause:
        same = len({one.cause for one in verdicts}) == 1
        yield first.cause if same else _AMOUNTS.sub("…", first.cause)
        return
    if not first.explanation:
        missing = first.kind == "baseline" and first.limit is None
        yield "has no baseline to match" if missing else UNEXPLAINED[first.kind]
        return
    line = first.explanation[0]
    if first.kind == "leak":
        yield "left behind"
    elif first.reference is None:
        yield "over a limit; the largest part:"
    yield line.get("category") or "other"
    yield from filter(None, (line.get("site"), line.get("operator") or line.get("module")))
