"""The output of ``gpumem predict``: the GPUs that are large enough, eager code beside compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.baseline.verdict import format_percent
from pytest_gpumem.cli.command import table
from pytest_gpumem.sizes import format_change, format_size
from pytest_gpumem.text import wrap

if TYPE_CHECKING:
    from pytest_gpumem.prediction.compiled import Pairs
    from pytest_gpumem.values.prediction import Prediction

SHOWN_PHASES = 6
CONTEXT = "The CUDA context comes on top: some 300 to 600 MiB, by driver and GPU."


RULES = "simulated by the rules of torch {}"
DRY = "torch {}'s own CUDA code over a runtime without kernels"
MEASURED = "measured with torch {}"
"""The origin of the numbers, for the heading."""


def lines(target: str, predictions: Sequence[Prediction], width: int, whose: str) -> Iterator[str]:
    """Yield the lines of output; a narrow terminal shows the first phases only."""
    yield heading(target, whose)
    yield ""
    yield from fit_table(predictions, phases_of(predictions), width)
    yield ""
    yield CONTEXT
    yield from dict.fromkeys(f"note: {note}" for one in predictions for note in one.notes)


def heading(target: str, whose: str = RULES) -> str:
    """Return the line that gives the origin of the numbers."""
    return f"{target}, {whose.format(version('torch').partition('+')[0])}"


def phases_of(predictions: Iterable[Prediction]) -> list[str]:
    """Return the names of the phases to show."""
    return list(dict.fromkeys(name for one in predictions for name in one.phases))[:SHOWN_PHASES]


def fit_table(
    predictions: Sequence[Prediction], phases: Sequence[str], width: int
) -> Iterator[str]:
    """Yield a table of the GPUs that are large enough, with the peaks of ``phases``."""
    added = [name for name in ("code", "ranks") if any(getattr(one, name) for one in predictions)]
    header = ["GPU", *("" for _ in added), "memory", "peak", "reserved", *phases, "fits"]
    rows = [header, *(_row(one, added, phases) for one in predictions)]
    last = len(header) - 1
    given_up = [*range(last - 1, last - 1 - len(phases), -1), len(added) + 3]
    left = [*range(len(added) + 1), last]
    yield from table(rows, left=left, given_up=given_up, width=width)


def _row(prediction: Prediction, added: Sequence[str], phases: Sequence[str]) -> list[str]:
    known = prediction.phases
    left = format_size(abs(prediction.left))
    if prediction.fits:
        # Cached memory that is released during the run can make more fit than is reserved in all.
        fits = f"yes, {left} left" if prediction.left >= 0 else "yes, after releasing its cache"
    else:
        fits = f"no, {left} missing" if prediction.left < 0 else "no, it is too fragmented"
    return [
        prediction.gpu,
        *(getattr(prediction, name) for name in added),
        format_size(prediction.total_memory),
        format_size(prediction.peak_allocated),
        format_size(prediction.peak_reserved),
        *(format_size(known[phase]) if phase in known else "" for phase in phases),
        fits,
    ]


BY_ITSELF = "compiled is what it gives to torch.compile itself"
MODULES = (
    "it calls no torch.compile: compiled is each module that no other module calls, by "
    "module.compile(); optimizers and code outside of modules stay eager"
)


def beside_lines(target: str, pairs: Pairs, by_itself: bool, width: int) -> Iterator[str]:
    """Yield the lines of output; of several GPUs, source lines are those of the first."""
    yield heading(target)
    yield from wrap(BY_ITSELF if by_itself else MODULES, width)
    yield ""
    predictions = [one for pair in pairs for one in pair]
    phases = phases_of(predictions)
    yield from fit_table(predictions, phases, width)
    yield ""
    rows = [["by compiling", "peak", "reserved", *phases]]
    for eager, compiled in pairs:
        name = f"{eager.gpu}, {compiled.ranks}" if compiled.ranks else eager.gpu
        changed = [
            _change(eager.peak_allocated, compiled.peak_allocated),
            _change(eager.peak_reserved, compiled.peak_reserved),
            *(_change(eager.phases.get(one), compiled.phases.get(one)) for one in phases),
        ]
        rows.append([name, *changed])
    yield from table(rows, left=(0,), given_up=range(len(rows[0]) - 1, 1, -1), width=width)
    yield ""
    yield from _by_line(*pairs[0], phases, width)
    yield CONTEXT
    yield from _notes_of_both(pairs)


def beside_dict(pairs: Pairs, by_itself: bool) -> dict[str, Any]:
    """Return everything as builtin types, sizes in bytes; changes are negative where it saves."""
    return {
        "compiled": "target" if by_itself else "modules",
        "gpus": [one.to_dict() for pair in pairs for one in pair],
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
            for eager, compiled in pairs
        ],
    }


def _line_changes(eager: Prediction, compiled: Prediction, phase: str) -> list[dict[str, Any]]:
    from pytest_gpumem.prediction.compiled import changes_by_line  # imports torch

    return [change.to_dict() for change in changes_by_line(eager, compiled, phase)]


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
        yield from explanation_lines(changes, width=width)
        yield ""


def _notes_of_both(pairs: Pairs) -> Iterator[str]:
    """Yield the notes; one on only one of the two names it."""
    eager, compiled = (
        list(dict.fromkeys(note for pair in pairs for note in pair[side].notes)) for side in (0, 1)
    )
    for note in compiled:
        yield f"note{'' if note in eager else ', compiled'}: {note}"
    for note in eager:
        if note not in compiled:
            yield f"note, eager: {note}"
