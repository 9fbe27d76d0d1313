"""``gpumem predict TARGET``: its memory, and whether it fits; also compiled, by line, by layer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explain import explain
from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.baseline.verdict import format_percent
from pytest_gpumem.cli.by_part import LAYER_ARGUMENTS, LINE_ARGUMENTS, run_by_layer, run_by_line
from pytest_gpumem.cli.command import (
    Answer,
    Argument,
    Command,
    refuse_others,
    sentences,
    table,
    terminal_width,
)
from pytest_gpumem.cli.target import (
    CUDA,
    DEVICE,
    DRY,
    SIM,
    DeviceOption,
    answer_on_dry,
    checked_nodeid,
    find_target,
    refusing,
    run_on_dry,
)
from pytest_gpumem.marker import parse_keyword
from pytest_gpumem.option_values import DEFAULT_GPU
from pytest_gpumem.quoting import quoted
from pytest_gpumem.simulated.gpu.catalogue import GPUS
from pytest_gpumem.sizes import format_change, format_size
from pytest_gpumem.text import wrap
from pytest_gpumem.values.errors import SimulationError
from pytest_gpumem.values.prediction import Prediction

if TYPE_CHECKING:
    from pytest_gpumem.prediction.function import Pairs
    from pytest_gpumem.prediction.process import Mode

LINE, LAYER = "line", "layer"

SHOWN_PHASES = 6
CONTEXT = "The CUDA context comes on top: some 300 to 600 MiB, by driver and GPU."
UNUSED = 'Nothing was allocated on the GPU: code for it says device="cuda" or .cuda().'

RULES = "simulated by the rules of torch {}"
BY_DRY = "torch {}'s own CUDA code over a runtime without kernels"
BY_GPU = "measured with torch {}"
"""The origin of the numbers, for the heading."""

BY_ITSELF = "compiled is what it gives to torch.compile itself"
MODULES = (
    "it calls no torch.compile: compiled is each module that no other module calls, by "
    "module.compile(); optimizers and code outside of modules stay eager"
)


def run(arguments: argparse.Namespace) -> Answer | int:
    """Predict; raises ``ValueError`` for bad input."""
    chosen = f"--by {arguments.by}" if arguments.by else "no --by"
    refuse_others(arguments, chosen, {"no --by": WHOLE, **_GROUPS})
    device: DeviceOption = arguments.device
    if arguments.by is not None:
        gpus = device.models(arguments.gpu, [DEFAULT_GPU])
        if len(gpus) > 1:
            raise ValueError(f"--by {arguments.by} looks at one GPU, not at {len(gpus)}; give one")
        if device.kind == DRY:
            return run_on_dry(arguments.given, gpus[0])
        show = run_by_line if arguments.by == LINE else run_by_layer
        return show(arguments, CUDA if device.kind == CUDA else gpus[0])
    gpus = device.models(arguments.gpu, list(GPUS))
    if device.kind != SIM:
        return _measured(arguments, device.kind, gpus)
    if not arguments.compile:
        return _answer(arguments.target, _simulated(arguments, gpus))

    from pytest_gpumem.prediction.function import compare  # imports torch

    pairs, by_itself = compare(lambda mode: _simulated(arguments, gpus, mode))
    return Answer(
        _beside_lines(arguments.target, pairs, by_itself, terminal_width()),
        lambda: {"target": arguments.target, **_beside_dict(pairs, by_itself)},
        failed=not all(compiled.fits for _, compiled in pairs),
    )


def _answer(target: str, predictions: Sequence[Prediction], whose: str = RULES) -> Answer:
    is_used = any(one.peak_allocated for one in predictions)
    lines = [
        *(_heading(target, whose), ""),
        *fit_table(predictions, _phases_of(predictions), terminal_width()),
        *("", CONTEXT if is_used else UNUSED),
        *sentences(f"note: {note}" for one in predictions for note in one.notes),
    ]
    return Answer(
        lines,
        lambda: {"target": target, "gpus": [one.to_dict() for one in predictions]},
        failed=not all(one.fits for one in predictions),
    )


def _measured(arguments: argparse.Namespace, kind: str, gpus: Sequence[str]) -> Answer:
    """Run the function on this process's CUDA device, or in processes with a dry device each."""
    if arguments.ranks or arguments.compile:
        raise ValueError(
            f"--{'ranks' if arguments.ranks else 'compile'} runs code on simulated GPUs: leave "
            f"--device {kind} out"
        )
    from pytest_gpumem.prediction.process import UNBOUNDED, predict_test

    if "::" in arguments.target and kind == DRY:
        nodeid = checked_nodeid(arguments.target)
        return _answer(arguments.target, predict_test(nodeid, gpus, dry=True), BY_DRY)
    if kind == CUDA:
        return _answer(arguments.target, [_measured_here(arguments.target)], BY_GPU)

    predictions = []
    for gpu in gpus:
        found = Prediction.from_dict(answer_on_dry(arguments.given, gpu)["gpus"][0])
        if not found.fits:
            large = answer_on_dry(arguments.given, gpu, memory=UNBOUNDED)["gpus"][0]
            found = replace(
                Prediction.from_dict(large), fits=False, total_memory=found.total_memory
            )
        predictions.append(found)
        arguments.progress.step()
    return _answer(arguments.target, predictions, BY_DRY)


def _measured_here(text: str) -> Prediction:
    from pytest_gpumem.prediction.function import MEASURED, device_here, predict

    device_here()  # raises a ``ValueError`` where there is none
    target = find_target(text)
    if isinstance(target, str):
        raise ValueError(f"{text} is a test: run pytest to measure it on this machine's device")
    with refusing(text, SimulationError):
        return predict(target, MEASURED, name=text)


def _simulated(
    arguments: argparse.Namespace, gpus: Sequence[str], mode: Mode | None = None
) -> list[Prediction]:
    """Return the target's memory on each of ``gpus``, for each number of ranks the worst rank's."""
    from pytest_gpumem.prediction.function import predict
    from pytest_gpumem.prediction.process import AS_IT_IS, predict_test
    from pytest_gpumem.simulating import simulate

    text: str = arguments.target
    with simulate(gpus[0]):  # the module's import finds a GPU
        target = find_target(text)
    if isinstance(target, str):
        if arguments.ranks:
            raise ValueError(
                f"{text} is a test, which says in its marker how many ranks there are: leave "
                "--ranks out, or give a function"
            )
        return predict_test(target, gpus, mode=mode or AS_IT_IS)
    worlds = [(gpu, size) for gpu in gpus for size in arguments.ranks or (None,)]
    arguments.progress.expect(len(worlds))
    predictions = []
    for gpu, size in worlds:
        with refusing(text, SimulationError):
            predictions.append(predict(target, gpu, ranks=size, mode=mode or AS_IT_IS))
        arguments.progress.step()
    return predictions


def _heading(target: str, whose: str = RULES) -> str:
    """Return the line that gives the origin of the numbers."""
    return f"{target}, {whose.format(version('torch').partition('+')[0])}"


def _phases_of(predictions: Sequence[Prediction]) -> list[str]:
    """Return the names of the phases to show."""
    return list(dict.fromkeys(name for one in predictions for name in one.phases))[:SHOWN_PHASES]


def fit_table(
    predictions: Sequence[Prediction],
    phases: Sequence[str],
    width: int,
    verdicts: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield a table of the GPUs that are large enough, with the peaks of ``phases``.

    ``verdicts`` are the last cells of GPUs of which the peak does not show it.
    """
    added = [name for name in ("code", "ranks") if any(getattr(one, name) for one in predictions)]
    header = ["GPU", *("" for _ in added), "memory", "peak", "reserved", *phases, "fits"]
    rows = [header, *(_row(one, added, phases) for one in predictions)]
    last = len(header) - 1
    for row in rows:
        row[last] = verdicts.get(row[0], row[last])
    given_up = [*range(last - 1, last - 1 - len(phases), -1), len(added) + 3]
    left = [*range(len(added) + 1), last]
    yield from table(rows, left=left, given_up=given_up, width=width)


def _row(prediction: Prediction, added: Sequence[str], phases: Sequence[str]) -> list[str]:
    known = prediction.phases
    left = format_size(abs(prediction.left))
    if prediction.fits:
        # The peak of reserved bytes may exceed the device if cached memory is released meanwhile.
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


def _beside_lines(target: str, pairs: Pairs, by_itself: bool, width: int) -> Iterator[str]:
    """Yield the lines of output; source lines are those on the first GPU."""
    yield _heading(target)
    yield from wrap(BY_ITSELF if by_itself else MODULES, width)
    yield ""
    predictions = [one for pair in pairs for one in pair]
    phases = _phases_of(predictions)
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
    yield from sentences(_notes_of_both(pairs))


def _beside_dict(pairs: Pairs, by_itself: bool) -> dict[str, Any]:
    """Return the JSON form as builtin types, in bytes; a negative change is a saving."""
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
    """Return the changes by compiling at the peak of a phase, or of the run; the largest first."""
    sites = (map(Site.from_dict, one.sites.get(phase, ())) for one in (compiled, eager))
    return [change.to_dict() for change in explain(*sites, compiled=True)]


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
    """Yield the changes by line, for each peak that differs."""
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
    """Yield the notes; a note on only one of the two runs names the run."""
    eager, compiled = (
        list(dict.fromkeys(note for pair in pairs for note in pair[side].notes)) for side in (0, 1)
    )
    for note in compiled:
        yield f"note{'' if note in eager else ', compiled'}: {note}"
    for note in eager:
        if note not in compiled:
            yield f"note, eager: {note}"


def _ranks(text: str) -> tuple[int, ...]:
    numbers = [number.strip() for number in text.split(",")]
    try:
        ranks: tuple[int, ...] = parse_keyword(
            "ranks",
            [int(n) if n.isascii() and n.isdecimal() and len(n) < 10 else n for n in numbers],
        )
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a number of ranks, nor several different ones; write 8 or 8,64"
        ) from None
    return ranks


WHOLE = (
    Argument(
        "--ranks N[,N...]",
        "run the function as one of so many ranks, the one that takes most; several "
        "numbers are run one after the other",
        type=_ranks,
    ),
    Argument(
        "--compile",
        "show eager code beside compiled code and what torch.compile saves, by phase and "
        "line; modules are compiled where TARGET compiles nothing itself",
    ),
)
"""Options of a prediction that is not by line or layer."""

_GROUPS = {"--by line": LINE_ARGUMENTS, "--by layer": LAYER_ARGUMENTS}

COMMAND = Command(
    description="Run TARGET on simulated GPUs and print its peak memory by phase, and whether "
    "it fits. No GPU is needed. Exit code 1 where it does not fit one of them. With --by line, "
    "print for each line of TARGET the memory before and after it, its peak, and the tensors that "
    "it added and removed; with --by layer, for each module of the first model that TARGET calls, "
    "shapes, parameters, FLOPs, and the memory that it keeps and its peak, with and without "
    "gradients.",
    run=run,
    arguments=(
        Argument(
            "target TARGET",
            "module:function or path.py:function that takes no arguments, or a test id; "
            "--by layer: one that calls a model, or returns a model and its inputs",
        ),
        Argument(
            "--gpu MODEL...",
            "model of the catalogue, like A100-40GB; may be given several times (default: "
            f"all; {DEFAULT_GPU} with --by)",
        ),
        DEVICE,
        Argument("--by", "show memory by source line, or layer by layer", choices=(LINE, LAYER)),
        *WHOLE,
    ),
    groups=_GROUPS,
    examples=(
        "gpumem predict train.py:step --gpu T4 --gpu A100-40GB",
        'gpumem predict "tests/test_model.py::test_step" --gpu "A100-80GB*2"',
        "gpumem predict train.py:step --gpu H100 --ranks 8,64",
        "gpumem predict train.py:step --gpu H100 --compile",
        "gpumem predict train.py:step --by line --function train.py:Net.forward",
        "gpumem predict torchvision.models:resnet50 --by layer --input 1x3x224x224",
    ),
)
