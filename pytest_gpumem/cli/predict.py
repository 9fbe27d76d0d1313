"""``gpumem predict TARGET``: its need, and whether it fits; also by line and by layer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.cli import fit
from pytest_gpumem.cli.by_part import LAYER_ARGUMENTS, LINE_ARGUMENTS, run_by_layer, run_by_line
from pytest_gpumem.cli.command import Answer, Command, argument, refuse_others, terminal_width
from pytest_gpumem.cli.target import (
    CUDA,
    DRY,
    SIM,
    DeviceOption,
    TargetError,
    answer_on_dry,
    checked_nodeid,
    device_argument,
    find_target,
    refusing,
    run_on_dry,
)
from pytest_gpumem.device import DeviceError
from pytest_gpumem.marker import parse_keyword
from pytest_gpumem.option_values import DEFAULT_GPU
from pytest_gpumem.progress import NOTHING_SHOWN, Progress
from pytest_gpumem.quoting import quoted

if TYPE_CHECKING:
    from pytest_gpumem.prediction.compiled import Mode
    from pytest_gpumem.values.prediction import Prediction

LINE, LAYER = "line", "layer"


def run(arguments: argparse.Namespace) -> Answer | int:
    """Predict; raises ``ValueError`` for bad input."""
    from pytest_gpumem.simulated.gpu.catalogue import GPUS

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
    asked = arguments.target, gpus, arguments.progress, arguments.ranks
    if not arguments.compile:
        return _answer(arguments.target, predictions_of(*asked))

    from pytest_gpumem.prediction.compiled import compare  # imports torch

    pairs, by_itself = compare(lambda mode: predictions_of(*asked, mode))
    return Answer(
        fit.beside_lines(arguments.target, pairs, by_itself, terminal_width()),
        lambda: {"target": arguments.target, **fit.beside_dict(pairs, by_itself)},
        failed=not all(compiled.fits for _, compiled in pairs),
    )


def _answer(target: str, predictions: Sequence[Prediction], whose: str = fit.RULES) -> Answer:
    return Answer(
        fit.lines(target, predictions, terminal_width(), whose),
        lambda: {"target": target, "gpus": [one.to_dict() for one in predictions]},
        failed=not all(one.fits for one in predictions),
    )


def _measured(arguments: argparse.Namespace, kind: str, gpus: Sequence[str]) -> Answer:
    """Run the function on this process's CUDA device, or in processes with a dry one each."""
    from pytest_gpumem.values.prediction import Prediction

    if arguments.ranks or arguments.compile:
        raise ValueError(
            f"--{'ranks' if arguments.ranks else 'compile'} runs code on simulated GPUs: leave "
            f"--device {kind} out"
        )
    if "::" in arguments.target and kind == DRY:
        from pytest_gpumem.prediction.process import predict_test

        nodeid = checked_nodeid(arguments.target)
        return _answer(arguments.target, predict_test(nodeid, gpus, dry=True), fit.DRY)
    if kind == CUDA:
        return _answer(arguments.target, [_measured_here(arguments.target)], fit.MEASURED)
    from pytest_gpumem.prediction.process import UNBOUNDED

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
    return _answer(arguments.target, predictions, fit.DRY)


def _measured_here(text: str) -> Prediction:
    from pytest_gpumem.prediction.function import MEASURED, device_here, predict
    from pytest_gpumem.values.errors import SimulationError

    try:
        device_here()
    except DeviceError as error:
        raise TargetError(str(error)) from error
    target = find_target(text)
    if isinstance(target, str):
        raise TargetError(f"{text} is a test: run pytest to measure it on this machine's device")
    with refusing(text, SimulationError):
        return predict(target, MEASURED, name=text)


def predictions_of(
    text: str,
    gpus: Sequence[str],
    progress: Progress = NOTHING_SHOWN,
    ranks: Sequence[int] | None = None,
    mode: Mode | None = None,
) -> list[Prediction]:
    """Return the need of the target ``text`` on each of ``gpus``, of the worst of so many ranks."""
    from pytest_gpumem.prediction.function import predict
    from pytest_gpumem.prediction.process import predict_test
    from pytest_gpumem.simulating import simulate
    from pytest_gpumem.values.errors import SimulationError

    with simulate(gpus[0]):  # the module's import finds a GPU
        target = find_target(text)
    if isinstance(target, str):
        if ranks:
            raise TargetError(
                f"{text} is a test, which says in its marker how many ranks there are: leave "
                "--ranks out, or give a function"
            )
        return predict_test(target, gpus, mode=mode)
    worlds = [(gpu, size) for gpu in gpus for size in ranks or (None,)]
    progress.expect(len(worlds))
    predictions = []
    for gpu, size in worlds:
        with refusing(text, SimulationError):
            predictions.append(predict(target, gpu, ranks=size, mode=mode))
        progress.step()
    return predictions


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
    argument(
        "--ranks N[,N...]",
        "run the function as one of so many ranks, the one that takes most; several "
        "numbers are run one after the other",
        type=_ranks,
    ),
    argument(
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
        argument(
            "target TARGET",
            "module:function or path.py:function that takes no arguments, or a test id; "
            "--by layer: one that calls a model, or returns a model and its inputs",
        ),
        argument(
            "--gpu MODEL...",
            "model of the catalogue, like A100-40GB; may be given several times (default: "
            f"all; {DEFAULT_GPU} with --by)",
        ),
        device_argument(),
        argument("--by", "show memory by source line, or layer by layer", choices=(LINE, LAYER)),
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
