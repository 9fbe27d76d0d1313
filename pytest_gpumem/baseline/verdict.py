"""One judged property of one test: the value that carries its own texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pytest_gpumem.sizes import format_exact, format_size

SHOWN_LINES = 10
"""Lines of an explanation that a failure prints; the JSON report holds all of them."""


@dataclass(frozen=True)
class Verdict:
    """One judged number.

    ``limit`` is the highest value that passes and ``actual`` what was measured, both in bytes.
    ``reference`` is what ``actual`` was compared with (a baseline or a prediction; ``None`` for a
    plain limit).

    Some failures are not a number that is too high: a phase that had to run and did not has
    ``actual`` 0, within its ``limit``; a baseline or prediction that had to exist and does not has
    neither ``limit`` nor ``reference``. A prediction may also be too high; a phase that was
    predicted and did not run has a ``reference`` alone.
    """

    kind: str
    """``limit``, ``leak``, ``baseline``, ``prediction`` or ``nothing_measured``."""
    metric: str
    """``peak_allocated``, ``peak_reserved`` or ``leaked``."""
    phase: str | None
    """``None`` for the whole test."""
    limit: int | None
    actual: int
    reference: int | None
    passed: bool
    tolerance: str = ""
    """As a reader would write it, ``1% + 1MiB``."""
    device: str = "cuda:0"
    simulated: bool = False
    explanation: tuple[Mapping[str, Any], ...] = ()
    gpu: str = ""
    """The device's model, ``A100-40GB``."""
    notes: tuple[str, ...] = ()
    """What the texts add, e.g. where else a baseline is known."""

    @property
    def short(self) -> str:
        """One line: what was measured, and by how much it is over or within what it may be."""
        headline = "; ".join((self._headline(), *self.notes))
        return f"{headline}{_where(self.device, self.simulated, self.gpu)}"

    def long(self, nodeid: str, command: str = "pytest") -> str:
        """Return the failure text of the test ``nodeid``: short text, explanation and remedy.

        ``command`` is how pytest is started, with the options that the remedy has to repeat.
        """
        return failure_text([self], nodeid, command)

    def explanation_lines(self) -> list[str]:
        """Return the lines that say whose bytes changed or, without a reference, are there."""
        return explanation_lines(self.explanation, signed=self.reference is not None)

    def remedy(self, nodeid: str, command: str = "pytest") -> list[str]:
        """Return the line that says how to make the measured number the baseline, if that helps."""
        if self.kind != "baseline" or self.passed:
            return []
        remedy = "record it" if self._no_baseline else "accept it"
        return [f"{remedy}: {update_command(nodeid, command)}"]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: builtin types only, so that it travels between pytest-xdist processes."""
        return {
            **asdict(self),
            "explanation": [dict(line) for line in self.explanation],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Rebuild what :meth:`to_dict` wrote."""
        sequences = {"explanation": tuple(data["explanation"]), "notes": tuple(data["notes"])}
        return cls(**{**data, **sequences})

    @property
    def _no_baseline(self) -> bool:
        return self.kind == "baseline" and self.limit is None

    @property
    def _phase_did_not_run(self) -> bool:
        if self.kind == "prediction":
            return self.limit is None and self.reference is not None
        return not self.passed and self.limit is not None and self.actual <= self.limit

    def _headline(self) -> str:
        if self.kind == "nothing_measured":
            return _nothing_measured(self.device, self.simulated)
        if self._no_baseline:
            return f"{self._measured()} and has no baseline to match"
        if self.kind == "prediction" and self.reference is None:
            return f"{self._measured()} and could not be predicted"
        if self._phase_did_not_run:
            allowed = self.limit if self.reference is None else self.reference
            return (
                f"phase {self.phase} did not run, "
                f"so its {self._yardstick()} of {format_size(allowed or 0)} was not checked"
            )
        return f"{self._measured()}, {self._comparison()}"

    def _measured(self) -> str:
        return measured_text(self.metric, self.phase, self.actual)

    def _yardstick(self) -> str:
        return self.kind if self.kind in ("baseline", "prediction") else "limit"

    def _comparison(self) -> str:
        if self.reference is not None:
            return compared_text(self._yardstick(), self.actual, self.reference, self.tolerance)
        limit = self.limit or 0
        if self.actual > limit:
            return f"{format_size(self.actual - limit)} over its limit of {format_size(limit)}"
        return f"within its limit of {format_size(limit)}"


@dataclass(frozen=True)
class Improvement:
    """A number that fell below its baseline by more than the tolerance; sizes in bytes.

    Reported and never a failure; unrecorded, it would let the memory grow back unseen.
    """

    metric: str
    phase: str | None
    """``None`` for the whole test."""
    actual: int
    reference: int
    tolerance: str
    device: str = "cuda:0"
    simulated: bool = False
    gpu: str = ""

    @property
    def short(self) -> str:
        """One line: what was measured, and by how much it is under its baseline."""
        measured = measured_text(self.metric, self.phase, self.actual)
        compared = compared_text("baseline", self.actual, self.reference, self.tolerance)
        return f"{measured}, {compared}{_where(self.device, self.simulated, self.gpu)}"

    def long(self, nodeid: str, command: str = "pytest") -> str:
        """Return the text for the test ``nodeid``, with the command that locks the gain in."""
        return f"{self.short}\nlock it in: {update_command(nodeid, command)}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: builtin types only, so that it travels between pytest-xdist processes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Improvement:
        """Rebuild what :meth:`to_dict` wrote."""
        return cls(**data)


def measured_text(metric: str, phase: str | None, actual: int) -> str:
    """Return what was measured as the start of a sentence; ``actual`` in bytes."""
    subject = phase or "the test"
    if metric == "leaked":
        return f"{format_exact(actual)} still allocated after {subject}"
    if metric == "peak_reserved":
        return f"{subject} reserved {format_exact(actual)}"
    return f"{subject} peaked at {format_exact(actual)}"


def compared_text(yardstick: str, actual: int, reference: int, tolerance: str) -> str:
    """Return how ``actual`` stands to ``reference`` (bytes), with the change in per cent.

    The percentage is left out where the reference is zero or less.
    """
    change = actual - reference
    tolerated = f"tolerance {tolerance}"
    if reference > 0 and change:
        tolerated = f"{format_percent(change, reference)}, {tolerated}"
    if not change:
        return f"equal to its {yardstick} ({tolerated})"
    side = "over" if change > 0 else "under"
    size = format_size(abs(change))
    return f"{size} {side} its {yardstick} of {format_size(reference)} ({tolerated})"


def format_percent(change: int, reference: int) -> str:
    """Return ``change`` in per cent of ``reference``, ``+33.0 %``; a tiny one never reads as none.

    ``reference`` must be positive, both are bytes.
    """
    percent = 100 * change / reference
    if change and abs(percent) < 0.05:
        return f"{'+' if change > 0 else '-'}<0.1 %"
    return f"{percent:+.1f} %"


def update_command(nodeid: str, command: str = "pytest") -> str:
    """Return the command line that records the present numbers of the test ``nodeid``."""
    quoted = "".join(f"\\{char}" if char in '\\"$`' else char for char in nodeid)
    return f'{command} --gpumem-update-baselines "{quoted}"'


def explanation_lines(
    explanation: tuple[Mapping[str, Any], ...], *, signed: bool = True
) -> list[str]:
    """Return ``explanation`` in lines, aligned in columns, largest first.

    ``signed`` lines are differences. Those beyond :data:`SHOWN_LINES` are summed up in a last one.
    """
    rows = [_explained(line, signed) for line in explanation[:SHOWN_LINES]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"  {sign}{size:>{widths[1]}}  {_columns(texts, widths[2:])}".rstrip()
        for sign, size, *texts in rows
    ]
    if hidden := explanation[SHOWN_LINES:]:
        total = sum(line["bytes"] for line in hidden)
        sign = _sign(total) if signed else ""
        kind = "changes" if signed else "sites"
        lines.append(f"  {sign}{format_size(abs(total))} in {len(hidden)} smaller {kind}")
    return lines


def _sign(change: int) -> str:
    return "-" if change < 0 else "+"


def _columns(texts: list[str], widths: list[int]) -> str:
    """Join ``texts`` in columns; one that no line fills is left out."""
    return "  ".join(f"{text:<{width}}" for text, width in zip(texts, widths, strict=True) if width)


def _explained(line: Mapping[str, Any], signed: bool) -> tuple[str, ...]:
    change = line["bytes"]
    # A library's workspace has no source line: its name stands where the line would.
    places = [line.get("site"), line.get("operator") or line.get("module")]
    site, operator = [place for place in places if place] + [""] * (2 - sum(map(bool, places)))
    count = line.get("count") or 1
    blocks = [f"{count} × {format_size(abs(change) // count)}", line.get("dtype") or ""]
    if signed and line.get("change") in ("new", "gone"):
        blocks.append(f"({line['change']})")
    if line.get("held_by"):
        blocks.append(f"held by {line['held_by']}")
    return (
        _sign(change) if signed else "",
        format_size(abs(change)),
        line.get("category") or "other",
        site,
        operator,
        " ".join(part for part in blocks if part),
    )


def _nothing_measured(device: str, simulated: bool) -> str:
    remedies = "ask `gpumem.device` inside the test"
    if simulated:
        remedies += ", or run with --gpumem-sim-scope=session"
    return (
        f"nothing was measured, because the test allocated nothing on {device}; the usual cause is "
        '`device = "cuda" if torch.cuda.is_available() else "cpu"` at import: ' + remedies
    )


def _where(device: str, simulated: bool, gpu: str) -> str:
    parts = [f"simulated {gpu}".strip()] if simulated else []
    if device != "cuda:0":
        parts.append(device)
    return f" [{', '.join(parts)}]" if parts else ""


def failure_text(verdicts: Iterable[Verdict], nodeid: str, command: str = "pytest") -> str:
    """Return what the test ``nodeid`` fails with: each verdict's text, then each remedy once.

    What explains several of them stands once, below the first; where a baseline's difference is
    explained, the limit of the same peak needs no list of its own.
    """
    verdicts = list(verdicts)
    compared = {v.phase for v in verdicts if v.kind == "baseline" and v.explanation}
    lines: list[str] = []
    shown: set[str] = set()
    for verdict in verdicts:
        lines.append(verdict.short)
        explained = verdict.explanation_lines()
        if verdict.kind == "limit" and verdict.phase in compared:
            continue
        if "\n".join(explained) not in shown:
            lines += explained
        elif explained:
            lines.append("  as above")
        shown.add("\n".join(explained))
    remedies = [line for verdict in verdicts for line in verdict.remedy(nodeid, command)]
    return "\n".join([*lines, *dict.fromkeys(remedies)])
