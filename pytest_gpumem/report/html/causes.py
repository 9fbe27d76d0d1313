"""What failures have in common: tests that fail for the same reason stand together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_gpumem.baseline.verdict import Verdict
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.sizes import format_size

UNEXPLAINED = {
    "limit": "over a limit",
    "leak": "memory left behind",
    "baseline": "over a baseline",
    "prediction": "not as predicted",
    "nothing_measured": "nothing was measured",
    "ran_eagerly": "compiled code ran eagerly",
}


def causes_of(records: Sequence[TestRecord]) -> list[dict[str, Any]]:
    """Return the causes of failures, the one with most tests first.

    ``words`` say what its ``tests`` share, which are positions in ``records``; ``size`` says how
    much it is, from the test where it is least to that where it is most.
    """
    causes: dict[_Cause, dict[int, int | None]] = {}
    for position, record in enumerate(records):
        if (found := _cause(record)) is not None:
            causes.setdefault(found[0], {})[position] = found[1]
    ordered = sorted(causes.items(), key=lambda item: (-len(item[1]), item[0].words))
    return [
        {"words": list(cause.words), "tests": list(tests), "size": cause.range(tests.values())}
        for cause, tests in ordered
    ]


class _Cause(NamedTuple):
    """What failures may share; ``signed`` where its bytes are a difference."""

    words: tuple[str, ...]
    signed: bool = False

    def range(self, sizes: Iterable[int | None]) -> str:
        """Return ``+32.0 MiB`` or, where tests differ, ``+32.0 MiB to +128.0 MiB``."""
        known = sorted(size for size in sizes if size is not None)
        ends = dict.fromkeys(map(self._text, [*known[:1], *known[-1:]]))
        return " to ".join(ends)

    def _text(self, size: int) -> str:
        return f"{'+' if self.signed and size > 0 else ''}{format_size(size)}"


def _cause(record: TestRecord) -> tuple[_Cause, int | None] | None:
    """Return the one thing that the failure of ``record`` is put down to, and its bytes."""
    if record.out_of_memory is not None and record.outcome in ("failed", "error"):
        place = record.out_of_memory.get("site"), record.out_of_memory.get("operator")
        words = ("ran out of memory, asked by", *filter(None, place))
        return _Cause(words), record.out_of_memory["requested"]
    if record.failed:
        verdict = telling(record.broken)
        if not verdict.explanation:
            return _Cause((_unexplained(verdict),)), None
        line = verdict.explanation[0]
        return _Cause(tuple(_words(line, verdict)), verdict.reference is not None), line["bytes"]
    if record.outcome in ("failed", "error"):
        return _Cause(("failed for another reason than memory",)), None
    return None


def telling(broken: Sequence[Verdict]) -> Verdict:
    """Return the one of ``broken`` that says most: one with a reference knows what changed."""
    return min(broken, key=lambda one: (not one.explanation, one.reference is None))


def _words(line: Mapping[str, Any], verdict: Verdict) -> Iterator[str]:
    if verdict.kind == "leak":
        yield "left behind"
    elif verdict.reference is None:
        yield "over a limit, mostly by"
    yield line.get("category") or "other"
    yield from filter(None, (line.get("site"), line.get("operator") or line.get("module")))


def _unexplained(verdict: Verdict) -> str:
    if verdict.kind == "baseline" and verdict.limit is None:
        return "has no baseline to match"
    return UNEXPLAINED[verdict.kind]
