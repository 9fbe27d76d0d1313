"""Verdicts on the properties of one test with their texts, and failures made of verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.quoting import quoted_for_shell
from pytest_gpumem.sizes import (
    exactly,
    format_apart,
    format_change,
    format_size,
    is_decimal,
    parse_size,
)
from pytest_gpumem.text import listed
from pytest_gpumem.values.serialization import Plain


@dataclass(frozen=True)
class Verdict(Plain):
    """A judged number.

    ``limit`` is the highest value that passes and ``actual`` the measured value, both in bytes.
    ``reference`` is the baseline or prediction that ``actual`` was compared with; ``None`` for a
    limit.

    Some failures have no number above a limit:

    - a required phase did not run: ``actual`` is 0 and ``limit`` is given;
    - a required baseline or prediction does not exist: neither ``limit`` nor ``reference``;
    - a predicted phase did not run: only ``reference``;
    - a prediction is higher than the measured value.
    """

    kind: str
    """``limit``, ``leak``, ``baseline``, ``prediction``; ``nothing_measured``, ``ran_eagerly``."""
    metric: str
    """``peak_allocated``, ``peak_reserved`` or ``leaked``."""
    phase: str | None
    """Name of the phase; ``None`` for the whole test."""
    limit: int | None
    actual: int
    reference: int | None
    passed: bool
    tolerance: str = ""
    """The tolerance as text, ``1% + 1MiB``."""
    device: str = "cuda:0"
    simulated: bool = False
    dry: bool = False
    explanation: tuple[Mapping[str, Any], ...] = ()
    gpu: str = ""
    """The device's model, ``A100-40GB``."""
    notes: tuple[str, ...] = ()
    """Additions to the texts, for example environments with a baseline."""
    written: str = ""
    """The limit as the test writes it, ``300KB``; empty for a number of bytes."""
    cause: str = ""
    """The reason for the number, as a sentence; empty if unknown."""

    @property
    def excess(self) -> int:
        """Bytes over the limit, or over the baseline or prediction; negative below it."""
        return self.actual - (self._compared or 0)

    @property
    def sizes(self) -> tuple[str, str]:
        """The measured number and its reference, with enough digits to distinguish them."""
        actual, compared = format_apart(self.actual, self._compared or 0)
        if self.reference is None:
            compared = self.limit_in_words or compared
        return actual, compared

    @property
    def limit_in_words(self) -> str:
        """The limit as written; empty if in KB/MB/GB, because reports use KiB/MiB/GiB."""
        return "" if is_decimal(self.written) else self.written

    @property
    def brief(self) -> str:
        """A few words with the exceeding number, for a line that already names the test."""
        if self.kind == "nothing_measured":
            return "nothing was measured"
        if self.kind == "ran_eagerly":
            return "compiled code ran eagerly"
        if self.did_not_run:
            return f"phase {self.phase} did not run"
        subject = {"leaked": "left ", "peak_reserved": "reserved "}.get(self.metric, "")
        subject = f"{self.phase} " if self.phase else subject
        if self._no_baseline or (self.kind == "prediction" and self.reference is None):
            return f"{subject}no {self._yardstick()} to match"
        change = format_size(abs(self.excess))
        if self.metric == "leaked" and not self.limit:
            return f"{subject}{change} behind"
        name = self.sizes[1] if self.reference is None else self._yardstick()
        sign, side = ("-", "under") if self.excess < 0 else ("+", "over")
        return f"{subject}{sign}{change} {side} {name}"

    @property
    def short(self) -> str:
        """A line with the measured number, and how far it is over or within its limit."""
        kind = "simulated" if self.simulated else "dry" if self.dry else ""
        other = "" if self.device == "cuda:0" else self.device
        where = ", ".join(filter(None, [f"{kind} {self.gpu}".strip() if kind else "", other]))
        return "; ".join((self._headline(), *self.notes)) + (f" [{where}]" if where else "")

    def explanation_lines(self, *, every: bool = False, width: int | None = None) -> list[str]:
        """Return the lines on changed bytes or, without a reference, on present ones."""
        signed = self.reference is not None
        return explanation_lines(self.explanation, signed=signed, every=every, width=width)

    def remedy(self, update: str) -> list[str]:
        """Return the line with the command that records the baseline, if that would help.

        ``update`` is that command.
        """
        if self.kind != "baseline" or self.passed:
            return []
        return [f"{'record it' if self._no_baseline else 'accept it'}: {update}"]

    @property
    def _no_baseline(self) -> bool:
        return self.kind == "baseline" and self.limit is None

    @property
    def did_not_run(self) -> bool:
        """Whether it is on a required phase that did not run."""
        if self.kind == "prediction":
            return self.limit is None and self.reference is not None
        return not self.passed and self.limit is not None and self.actual <= self.limit

    def _headline(self) -> str:
        if self.kind == "nothing_measured":
            scope = ", or run with --gpumem-sim-scope=session" * (self.simulated or self.dry)
            return (
                f"nothing was measured, because the test allocated nothing on {self.device}; the "
                'usual cause is `device = "cuda" if torch.cuda.is_available() else "cpu"` at '
                f"import: ask `gpumem.device` inside the test{scope}"
            )
        if self.kind == "ran_eagerly":
            return "compiled code ran eagerly, so what it allocates says nothing of its baseline"
        if self._no_baseline:
            return f"{self._measured()} and has no baseline to match"
        if self.kind == "prediction" and self.reference is None:
            return f"{self._measured()} and could not be predicted"
        if self.did_not_run:
            size = self.limit_in_words or format_size(self._compared or 0)
            yardstick = f"{self._yardstick()} of {size}"
            return f"phase {self.phase} did not run, so its {yardstick} was not checked"
        if self.reference is not None:
            return f"{self._measured()}, {self._against(self.reference)}"
        # As the test writes it, or with the exact bytes.
        limit, nbytes = self.sizes[1], self.limit or 0
        if parse_size(limit.replace(",", "")) != nbytes:
            limit = exactly(limit, nbytes)
        over = f"{format_size(self.excess)} over" if self.excess > 0 else "within"
        return f"{self._measured()}, {over} its limit of {limit}"

    @property
    def _compared(self) -> int | None:
        return self.limit if self.reference is None else self.reference

    def _measured(self) -> str:
        """Return the measured number as the start of a sentence."""
        subject, text = self.phase or "the test", self.sizes[0]
        if self._compared is None or text == f"{self.actual:,} B":
            text = format_size(self.actual)
        actual = exactly(text, self.actual)
        if self.metric == "leaked":
            return f"{actual} still allocated after {subject}"
        return f"{subject} {'reserved' if self.metric == 'peak_reserved' else 'peaked at'} {actual}"

    def _against(self, reference: int) -> str:
        """Return the comparison with ``reference``, also in per cent if that is above zero."""
        change, tolerated = self.excess, f"tolerance {self.tolerance}"
        if not change:
            return f"equal to its {self._yardstick()} ({tolerated})"
        if reference > 0:
            tolerated = f"{format_percent(change, reference)}, {tolerated}"
        side = f"{'over' if change > 0 else 'under'} its {self._yardstick()}"
        return f"{format_size(abs(change))} {side} of {self.sizes[1]} ({tolerated})"

    def _yardstick(self) -> str:
        return self.kind if self.kind in ("baseline", "prediction") else "limit"


@dataclass(frozen=True)
class Improvement(Plain):
    """A number below its baseline by more than the tolerance; sizes in bytes.

    It is reported and no failure. If it is not recorded, memory can grow again unnoticed.
    """

    metric: str
    phase: str | None
    """Name of the phase; ``None`` for the whole test."""
    actual: int
    reference: int
    tolerance: str
    device: str = "cuda:0"
    simulated: bool = False
    gpu: str = ""
    dry: bool = False

    @property
    def short(self) -> str:
        """A line with the measured number, and how far it is under its baseline."""
        verdict = Verdict("baseline", limit=self.reference, passed=True, **vars(self))
        return verdict.short


def format_percent(change: int, reference: int) -> str:
    """Return ``change`` in per cent of ``reference``, ``+33.0 %``, or ``+<0.1 %`` for a tiny one.

    ``reference`` must be positive, both are bytes.
    """
    percent = 100 * change / reference
    if change and abs(percent) < 0.05:
        return f"{'+' if change > 0 else '-'}<0.1 %"
    return f"{percent:+.1f} %"


def change_text(before: int, now: int) -> str:
    """Return how ``now`` differs from ``before``, both in bytes: ``+16.0 MiB (+25.0 %)``."""
    percent = f" ({format_percent(now - before, before)})" if before > 0 else ""
    return f"{format_change(now - before)}{percent}"


def update_command(nodeid: str, command: str = "pytest") -> str:
    """Return the command line that records the numbers of the test ``nodeid``."""
    return f"{command} --gpumem-update-baselines {quoted_for_shell(nodeid)}"


_RANKS = {"nothing_measured": 0, "ran_eagerly": 1, "baseline": 2, "prediction": 2, "leak": 2}
"""Ranks of kinds of verdicts: those that invalidate the numbers come first, a limit last."""
_LIMIT, _MISSING = 3, 4


@dataclass(frozen=True)
class FailureStatement:
    """A verdict in a failure's text, with the verdicts of phases that are merged into it."""

    verdict: Verdict
    others: tuple[Verdict, ...] = ()

    @property
    def rank(self) -> tuple[int, int, bool]:
        """The sort key: kind of verdict, then excess, then the whole test before a phase."""
        verdict = self.verdict
        rank = _RANKS.get(verdict.kind, _LIMIT)
        if verdict.kind == "baseline" and verdict.limit is None:
            rank = _MISSING
        return rank, -abs(verdict.excess), verdict.phase is not None


def failure_statements(broken: Iterable[Verdict]) -> list[FailureStatement]:
    """Return the statements of a failure, the representative one first.

    Comparisons with a baseline, or with a prediction, are one statement: the whole test's verdict,
    to which the verdicts of phases add their numbers.
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
    # Of equal ranks a comparison comes first, because it explains the bytes.
    return sorted([*statements, *single], key=lambda statement: statement.rank)


def main_verdict(broken: Iterable[Verdict]) -> Verdict:
    """Return the representative verdict of a failure."""
    return failure_statements(broken)[0].verdict


def failure_text(
    verdicts: Iterable[Verdict], update: str, *, every: bool = False, width: int | None = None
) -> str:
    """Return a test's failure text: its cause, each statement, then each remedy once.

    ``update`` is the command line that records the test's numbers. Only the first statement has
    explanation lines, unless ``every`` is set. ``every`` and ``width`` are arguments of
    :func:`~pytest_gpumem.attribution.explanation.explanation_lines`, too.
    """
    verdicts = list(verdicts)
    lines = list(statement_lines(verdicts, every=every, width=width))
    remedies = [line for verdict in verdicts for line in verdict.remedy(update)]
    return "\n".join([*lines, *dict.fromkeys(remedies)])


def statement_lines(
    broken: Sequence[Verdict], *, every: bool = False, width: int | None = None
) -> Iterator[str]:
    """Yield the cause of a failure, then its statements; the first one has an explanation."""
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
