"""The GPUs that are large enough: the table of predictions, with its notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from pytest_gpumem.cli.command import UNLIMITED, table
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.values.prediction import Prediction

SHOWN_PHASES = 6
CONTEXT = "The CUDA context comes on top: some 300 to 600 MiB, by driver and GPU."


RULES = "simulated by the rules of torch {}"
DRY = "torch {}'s own CUDA code over a runtime without kernels"
MEASURED = "measured with torch {}"
"""The origin of the numbers, for the heading."""


def lines(
    target: str, predictions: Sequence[Prediction], width: int = UNLIMITED, whose: str = RULES
) -> Iterator[str]:
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
    header = ["GPU", "memory", "peak", "reserved", *phases, "fits"]
    rows = [header, *(_row(one, phases) for one in predictions)]
    given_up = [*range(len(header) - 2, len(header) - 2 - len(phases), -1), 3]
    left = [0, len(header) - 1]
    for added in ([one.ranks for one in predictions], [one.code for one in predictions]):
        if any(added):
            for row, cell in zip(rows, ["", *added], strict=True):
                row.insert(1, cell)
            given_up = [column + 1 for column in given_up]
            left = [0, *(column + 1 for column in left)]
    yield from table(rows, left=tuple(left), given_up=given_up, width=width)


def _row(prediction: Prediction, phases: Sequence[str]) -> list[str]:
    known = prediction.phases
    left = format_size(abs(prediction.left))
    if prediction.fits:
        # Cached memory that is released during the run can make more fit than is reserved in all.
        fits = f"yes, {left} left" if prediction.left >= 0 else "yes, after releasing its cache"
    else:
        fits = f"no, {left} missing" if prediction.left < 0 else "no, it is too fragmented"
    return [
        prediction.gpu,
        format_size(prediction.total_memory),
        format_size(prediction.peak_allocated),
        format_size(prediction.peak_reserved),
        *(format_size(known[phase]) if phase in known else "" for phase in phases),
        fits,
    ]
