"""``gpumem predict TARGET --by line`` and ``--by layer``: memory by source line, layer by layer."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.cli.command import Answer, Argument, table, terminal_width
from pytest_gpumem.cli.target import CUDA, Function, find_target, refusing
from pytest_gpumem.quoting import quoted
from pytest_gpumem.sizes import format_apart, format_size
from pytest_gpumem.text import wrap
from pytest_gpumem.values.errors import SimulationError

if TYPE_CHECKING:
    from pytest_gpumem.prediction.layers import Layer
    from pytest_gpumem.prediction.lines import Line

MOST_SOURCE, LEAST_SOURCE = 60, 20
NUMBERS = 56
"""The width of a line's numbers, with the gaps."""
PROCESS = 20
"""The width of the bytes that the process holds, which are left out in a narrow terminal."""


def run_by_line(arguments: argparse.Namespace, gpu: str) -> Answer:
    """Run the function; raises ``ValueError`` for bad input."""
    import torch

    from pytest_gpumem.prediction.function import several_here
    from pytest_gpumem.prediction.lines import lines_of

    text: str = arguments.target
    target = _function(text, gpu, "lines are those of a function")
    followed = [
        _undecorated(name, _function(name, gpu, "give a function", takes_arguments=True))
        for name in arguments.function
    ]
    if gpu == CUDA and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device; name a model to be simulated")
    with refusing(text, SimulationError, ValueError):
        found = lines_of(target, [_undecorated(text, target), *followed], gpu)
    machine = several_here() if gpu == CUDA else gpu
    first = f", cuda:0 of {machine}" if "*" in machine or "," in machine else ""
    return Answer(
        _line_lines(found, first, terminal_width()), lambda: [line.to_dict() for line in found]
    )


def _function(text: str, gpu: str, wrong: str, *, takes_arguments: bool = False) -> Function:
    """Return the function ``text``; ``wrong`` is the error if it names a test."""
    from pytest_gpumem.simulating import simulate

    with nullcontext() if gpu == CUDA else simulate(gpu):  # the module's import finds a GPU
        target = find_target(text, takes_arguments=takes_arguments)
    if isinstance(target, str):
        raise ValueError(f"{text}: {wrong}; write path.py:function")
    return target


def _undecorated(text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the undecorated function, which must be written in Python to have lines."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not hasattr(function, "__code__"):
        raise ValueError(f"{text}: {type(function).__name__} has no lines; name a function")
    return function


def _line_lines(lines: Sequence[Line], first: str, width: int) -> Iterator[str]:
    """Yield the lines of output; a narrow terminal shortens the source.

    ``first`` names the device whose memory is shown, where there are several.
    """
    folder = Path.cwd()
    number = max((len(str(line.number)) for line in lines), default=1)
    wide = width >= number + NUMBERS + PROCESS + LEAST_SOURCE
    numbers = NUMBERS + PROCESS * wide
    room = max(min(width - number - numbers, MOST_SOURCE), LEAST_SOURCE)
    source = min(max((len(line.source) for line in lines), default=1), room)
    heading = ""
    for line in lines:
        path = Path(line.path)
        shown_path = path.relative_to(folder) if path.is_relative_to(folder) else path
        place = f"{shown_path.as_posix()}, {line.function}(){first}"
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


LINE_ARGUMENTS = (
    Argument(
        "--function NAME...", "follow this function, too: module:function or path.py:Class.method"
    ),
)


HEADER = (
    *("layer", "kind", "input", "output", "parameters", "multiply-adds", "FLOPs"),
    *("read", "written", "kept", "peak", "kept, inference", "peak, inference"),
)
_GROUPS = ("", "", "", "", "", "", "", "", "", "", "training", "", "inference")
"""Headings above the columns in a terminal."""
_GIVEN_UP = (1, 7, 8, 2, 5, 11, 12)
"""Columns to leave out in a narrow terminal: kind, bytes moved, input, operations, inference."""
_TEXTS = 4
"""Number of text columns; the others are numbers."""


def run_by_layer(arguments: argparse.Namespace, gpu: str) -> Answer:
    """Run the model; raises ``ValueError`` for bad input."""
    from pytest_gpumem.prediction.layers import layers_of

    if arguments.csv and arguments.json:
        raise ValueError("--csv and --json are two forms of the same; give one of them")
    text: str = arguments.target
    target = _function(text, gpu, "layers are those of a function")
    with refusing(text, SimulationError, ValueError):
        found = layers_of(target, gpu, arguments.input)
    shown = [layer for layer in found if arguments.depth is None or layer.depth <= arguments.depth]
    if arguments.csv:
        written = StringIO()
        csv.writer(written, lineterminator="\n").writerows([HEADER, *map(_values, shown)])
        return Answer(written.getvalue().splitlines(), list)
    on = "GPU" if gpu == CUDA else f"simulated {gpu}"
    return Answer(
        _layer_lines(text, shown, terminal_width(), gpu=on),
        lambda: [layer.to_dict() for layer in shown],
    )


def _layer_lines(target: str, layers: Sequence[Layer], width: int, *, gpu: str) -> Iterator[str]:
    """Yield the lines of output; a narrow terminal gets fewer columns."""
    model = layers[0]
    yield (
        f"{target}: {model.kind}, {model.parameters:,} parameters, "
        f"{_count(model.multiply_adds)} multiply-adds, {_count(model.flops)}FLOPs"
    )
    yield ""
    rows = [_GROUPS, tuple(title.partition(",")[0] for title in HEADER), *map(_row, layers)]
    yield from table(rows, left=range(_TEXTS), given_up=_GIVEN_UP, width=width)
    yield ""
    if not (model.training.peak or model.inference.peak):
        yield from wrap(
            f"nothing was allocated on the {gpu}, as of a model on the CPU: move the "
            f"model and its inputs there, as .cuda() does",
            width,
        )
        return
    yield from wrap(
        f"the whole model keeps {format_size(model.training.kept)} for backward and peaks at "
        f"{format_size(model.training.peak)} above its parameters and inputs; without gradients it "
        f"keeps {format_size(model.inference.kept)} and peaks at "
        f"{format_size(model.inference.peak)}",
        width,
    )
    held, written = format_apart(model.outputs_held, model.written)
    outputs = f"the outputs of its layers are {held}, and as much again with their gradients"
    if model.outputs_held != model.written:
        outputs += f"; {written} if those in place, and views, had memory of their own"
    yield from wrap(outputs, width)


def _row(layer: Layer) -> tuple[str, ...]:
    name = layer.path.rpartition(".")[2] or layer.kind
    _, *texts, parameters, macs, flops = _values(layer)[:7]
    numbers = (
        f"{parameters:,}" if parameters else "",
        *(_count(int(count)).rstrip() if count else "" for count in (macs, flops)),
    )
    sizes = (format_size(int(size)) for size in _values(layer)[7:])
    return f"{'  ' * layer.depth}{name}", *map(str, texts), *numbers, *sizes


def _values(layer: Layer) -> tuple[str | int, ...]:
    """Return the values of :data:`HEADER`."""
    shapes = _shapes(layer.inputs), _shapes(layer.outputs)
    training, inference = layer.training, layer.inference
    return (
        *(layer.path or layer.kind, layer.kind, *shapes),
        *(layer.parameters, layer.multiply_adds, layer.flops, layer.read, layer.written),
        *(training.kept, training.peak, inference.kept, inference.peak),
    )


_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")


def _input(text: str) -> tuple[tuple[int, ...], str]:
    shape, _, dtype = text.lower().partition(":")
    parts = shape.split("x")
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a shape; write 1x3x224x224")
    if dtype and dtype not in _DTYPES:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is of none of {', '.join(_DTYPES)}")
    return tuple(map(int, parts)), dtype or _DTYPES[0]


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    shown = ["×".join(map(str, shape)) or "scalar" for shape in shapes[:2]]
    return ", ".join(shown) + (f", {len(shapes) - 2} more" if len(shapes) > 2 else "")


def _count(flops: int) -> str:
    amount = float(flops)
    for unit in ("", "K", "M", "G", "T"):
        if amount < 1000 or unit == "T":
            break
        amount /= 1000
    return f"{amount:,.0f} {unit}" if not unit else f"{amount:,.2f} {unit}"


LAYER_ARGUMENTS = (
    Argument("--depth N", "modules within modules to show (default: all)", type=int),
    Argument(
        "--input SHAPE[:DTYPE]...",
        "shape of an input, like 1x3x224x224 or 8x256:int64, if TARGET returns only a model; "
        "once for each input (default: of float32)",
        type=_input,
    ),
    Argument("--csv", "print comma-separated values, in bytes"),
)
