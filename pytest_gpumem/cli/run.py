"""``gpumem run SCRIPT``: what a script as it is takes of a GPU, in its first steps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from pytest_gpumem.baseline.explanation import explanation_lines
from pytest_gpumem.cli.columns import UNLIMITED, table, terminal_width
from pytest_gpumem.cli.command import Answer, Command, argument
from pytest_gpumem.measurement.record import Measurement, PhaseRecord
from pytest_gpumem.option_values import DEFAULT_GPU
from pytest_gpumem.report.rows import parents_first
from pytest_gpumem.script import request as endings
from pytest_gpumem.script.entry import Script
from pytest_gpumem.script.process import Result, Settings, run_on
from pytest_gpumem.simulated.gpu.catalogue import find_machine
from pytest_gpumem.sizes import format_size

FAILED = 1
"""It does not fit, or it raised."""


def run(arguments: argparse.Namespace) -> Answer | int:
    """Run the script; raises ``ValueError`` for what cannot be run."""
    script = Script(arguments.script, tuple(arguments.arguments), arguments.module)
    gpus = [
        gpu if gpu == endings.MEASURED else find_machine(gpu).name
        for gpu in arguments.gpu or [DEFAULT_GPU]
    ]
    script.check()
    if find_spec("torch") is None:
        raise ModuleNotFoundError("no torch", name="torch")
    settings = Settings(arguments.steps, arguments.seconds, quiet=arguments.json)
    results = []
    for gpu in dict.fromkeys(gpus):
        result = run_on(script, gpu, settings)
        if result.told.ending in (endings.RAISED, endings.EXITED):
            return _failed(script, result)
        results.append(result)
    return Answer(
        lines(script, results, terminal_width()),
        dict,
        0 if all(result.fits for result in results) else FAILED,
    )


def _failed(script: Script, result: Result) -> int:
    answer = result.told
    how = (
        f"ended with exit code {answer.sentence}"
        if answer.ending == endings.EXITED
        else f"raised {answer.sentence}"
    )
    print(f"gpumem: {script.name} {how}", file=sys.stderr)
    return FAILED


def lines(script: Script, results: Sequence[Result], width: int = UNLIMITED) -> Iterator[str]:
    for result in results:
        m = result.told.measurements[0]
        yield f"{result.told.ending} {result.told.steps} {result.told.seconds}"
        for phase in parents_first(m.phases):
            yield f"{phase.name} {phase.parent} {format_size(phase.peak_allocated)}"
        yield format_size(m.peak_allocated)
        yield from explanation_lines(m.sites, signed=False, width=width)
        yield from m.notes


COMMAND = Command(
    description="Run a script",
    run=run,
    arguments=(
        argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python"),
        argument("--gpu", metavar="MODEL", action="append", help="gpu"),
        argument("--steps", metavar="N", type=int, default=2, help="steps"),
        argument("--seconds", metavar="S", type=float, default=60.0, help="secs"),
        argument("script", metavar="SCRIPT", help="script"),
        argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments"),
    ),
    examples=("gpumem run train.py --batch-size 32",),
)
