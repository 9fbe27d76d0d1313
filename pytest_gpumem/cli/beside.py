"""The output of ``gpumem predict --compile``: eager code beside compiled code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_gpumem.baseline.explanation import explanation_lines
from pytest_gpumem.baseline.verdict import format_percent
from pytest_gpumem.cli.command import UNLIMITED, table
from pytest_gpumem.cli.fit import CONTEXT, fit_table, heading, phases_of
from pytest_gpumem.prediction.compiled import Beside, changes_by_line
from pytest_gpumem.sizes import format_change, format_size
from pytest_gpumem.text import wrap
from pytest_gpumem.values.prediction import Prediction

BY_ITSELF = "compiled is what it gives to torch.compile itself"
MODULES = (
    "it calls no torch.compile: compiled is each module that no other module calls, by "
    "module.compile(); optimizers and code outside of modules stay eager"
)


def lines(target: str, both: Beside, width: int = UNLIMITED) -> Iterator[str]:
    """Yield the lines of output; of several GPUs, source lines are those of the first."""
    yield heading(target)
    yield from wrap(BY_ITSELF if both.by_itself else MODULES, width)
    yield ""
    predictions = [one for pair in both.pairs for one in pair]
    phases = phases_of(predictions)
    yield from fit_table(predictions, phases, width)
    yield ""
    yield from _changes(both, phases, width)
    yield ""
    yield from _by_line(*both.pairs[0], phases, width)
    yield CONTEXT
    yield from _notes(both)


def as_dict(both: Beside) -> dict[str, Any]:
    """Return everything as builtin types, sizes in bytes; changes are negative where it saves."""
    return {
        "compiled": "target" if both.by_itself else "modules",
        "gpus": [one.to_dict() for pair in both.pairs for one in pair],
        "changes": [
            {
                "gpu": eager.gpu,
                "peak_allocated": compiled.peak_allocated - eager.peak_allocated,
                "peak_reserved": compiled.peak_reserved - eager.peak_reserved,
                "lines": _line_changes(eager, compiled, ""),
                "phases": {
                    name: {
                        "peak_allocated": peak - eager.phases[name],
                        "lines": _line_changes(eager, compiled, name),
                    }
                    for name, peak in compiled.phases.items()
                    if name in eager.phases
                },
            }
            for eager, compiled in both.pairs
        ],
    }


def _line_changes(eager: Prediction, compiled: Prediction, phase: str) -> list[dict[str, Any]]:
    return [change.to_dict() for change in changes_by_line(eager, compiled, phase)]


def _changes(both: Beside, phases: list[str], width: int) -> Iterator[str]:
    """Yield the change of each peak by compiling."""
    rows = [["by compiling", "peak", "reserved", *phases]]
    for eager, compiled in both.pairs:
        name = f"{eager.gpu}, {compiled.ranks}" if compiled.ranks else eager.gpu
        changed = [
            _change(eager.peak_allocated, compiled.peak_allocated),
            _change(eager.peak_reserved, compiled.peak_reserved),
            *(_change(eager.phases.get(one), compiled.phases.get(one)) for one in phases),
        ]
        rows.append([name, *changed])
    yield from table(rows, left=(0,), given_up=range(len(rows[0]) - 1, 1, -1), width=width)


def _change(eager: int | None, compiled: int | None) -> str:
    if eager is None or compiled is None:
        return ""
    change = compiled - eager
    if not change or not eager:
        return format_size(change)
    return f"{format_change(change)} ({format_percent(change, eager)})"


def _by_line(
    eager: Prediction, compiled: Prediction, phases: Sequence[str], width: int
) -> Iterator[str]:
    """Yield which lines hold more or less, at each peak that differs."""
    peaks = [{**one.phases, "": one.peak_allocated} for one in (eager, compiled)]
    differing = [name for name in (*phases, "") if peaks[0].get(name) != peaks[1].get(name)]
    for phase in differing:
        printed = (all(one.get(name) == one[""] for one in peaks) for name in phases)
        if not phase and any(printed):
            continue
        changes = _line_changes(eager, compiled, phase)
        yield f"by line, at the peak{' of ' * bool(phase)}{phase} on {eager.gpu}:"
        yield from explanation_lines(changes, width=None if width == UNLIMITED else width)
        yield ""


def _notes(both: Beside) -> Iterator[str]:
    """Yield the notes; one on only one of the two names it."""
    eager, compiled = (
        list(dict.fromkeys(note for pair in both.pairs for note in pair[side].notes))
        for side in (0, 1)
    )
    for note in compiled:
        yield f"note{'' if note in eager else ', compiled'}: {note}"
    for note in eager:
        if note not in compiled:
            yield f"note, eager: {note}"
