"""``gpumem predict TARGET --by line``: memory by source line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gpumem.cli.command import UNLIMITED, Answer, argument, terminal_width
from pytest_gpumem.cli.target import TargetError, find_target, refusing
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from pytest_gpumem.prediction.lines import Line


MOST_SOURCE, LEAST_SOURCE = 60, 20
NUMBERS = 56
"""Columns of the terminal that a line's numbers take, with the gaps."""
PROCESS = 20
"""Columns of the bytes that the process holds, which a narrow terminal omits."""


def run(arguments: argparse.Namespace, gpu: str) -> Answer:
    """Run the function; raises ``ValueError`` for bad input."""
    import torch

    from pytest_gpumem.prediction.lines import MEASURED, lines_of, on_device
    from pytest_gpumem.values.errors import SimulationError

    text: str = arguments.target
    with on_device(gpu):  # the module's import finds a GPU
        target = find_target(text)
        followed = [_function(name) for name in arguments.function]
    if gpu == MEASURED and not torch.cuda.is_available():
        raise TargetError("torch sees no CUDA device; name a model to be simulated")
    if isinstance(target, str):
        raise TargetError(f"{text}: lines are those of a function; write path.py:function")
    with refusing(text, SimulationError, ValueError):
        found = lines_of(target, [_plain(text, target), *followed], gpu)
    return Answer(text_lines(found, terminal_width()), lambda: [line.to_dict() for line in found])


def _function(text: str) -> Callable[..., Any]:
    target = find_target(text, takes_arguments=True)
    if isinstance(target, str):
        raise TargetError(f"{text}: give a function; write path.py:function")
    return _plain(text, target)


def _plain(text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below decorators; only one written in Python has lines."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not hasattr(function, "__code__"):
        raise TargetError(f"{text}: {type(function).__name__} has no lines; name a function")
    return function


def text_lines(lines: Sequence[Line], width: int = UNLIMITED) -> Iterator[str]:
    """Yield the lines of output; a narrow terminal shortens the source."""
    from pytest_gpumem.prediction.lines import shown as shown_path

    number = max((len(str(line.number)) for line in lines), default=1)
    wide = width >= number + NUMBERS + PROCESS + LEAST_SOURCE
    numbers = NUMBERS + PROCESS * wide
    room = max(min(width - number - numbers, MOST_SOURCE), LEAST_SOURCE)
    source = min(max((len(line.source) for line in lines), default=1), room)
    heading = ""
    for line in lines:
        place = f"{shown_path(line.path)}, {line.function}()"
        if place != heading:
            if heading:
                yield ""
            yield place
            heading = place
        text = line.source if len(line.source) <= source else f"{line.source[: source - 1]}…"
        times = f"  {line.times} times" if line.times > 1 else ""
        held = "?" if line.process is None else format_size(line.process)
        process = f"  process {held:>10}" if wide else ""
        yield (
            f"  {line.number:>{number}}  {text:<{source}}  {format_size(line.before):>10} -> "
            f"{format_size(line.after):>10}  peak {format_size(line.peak):>10}{process}{times}"
        )
        for sign, groups in (("+", line.added), ("-", line.removed)):
            for group in groups:
                shape = "" if group.shape is None else f"({','.join(map(str, group.shape))})"
                words = (f"{group.count} ×", shape, format_size(group.bytes), group.dtype)
                shown = " ".join(filter(None, (*words, group.kind)))
                yield f"  {'':>{number}}    {sign} {shown}"


ARGUMENTS = (
    argument(
        "--function NAME",
        "follow this function, too: module:function or path.py:Class.method",
        group="--by line",
        action="append",
        default=[],
    ),
)
