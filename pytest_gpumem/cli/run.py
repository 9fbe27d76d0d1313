"""``gpumem run SCRIPT``: the GPU memory of an unchanged script in its first steps."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.cli.command import (
    Answer,
    Argument,
    Command,
    above_zero,
    sentences,
    table,
    terminal_width,
)
from pytest_gpumem.cli.predict import CONTEXT, fit_table
from pytest_gpumem.cli.target import CUDA, DEVICE, DRY, DeviceOption
from pytest_gpumem.option_values import DEFAULT_GPU
from pytest_gpumem.quoting import printable, quoted
from pytest_gpumem.report.rows import parents_first
from pytest_gpumem.script import process as endings
from pytest_gpumem.script.entry import Script, kept_test
from pytest_gpumem.script.process import ScriptResult, iteration_of, run_on
from pytest_gpumem.simulated.gpu.catalogue import find_machine
from pytest_gpumem.sizes import format_size
from pytest_gpumem.text import counted, wrap
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.prediction import Prediction


def run(arguments: argparse.Namespace) -> Answer | int:
    """Run the script; raises ``ValueError`` for a script that cannot be run."""
    script = Script(arguments.script, tuple(arguments.arguments), arguments.module)
    device: DeviceOption = arguments.device
    kind = endings.DRY if device.kind == DRY else ""
    otherwise = endings.MEASURED if device.kind == CUDA else DEFAULT_GPU
    names = [
        gpu if gpu == endings.MEASURED else f"{kind}{find_machine(gpu).name}"
        for gpu in device.models(arguments.gpu, [otherwise])
    ]
    script.check()
    if find_spec("torch") is None:  # else a process would start only to report that
        raise ModuleNotFoundError("torch is not installed", name="torch")
    limits = {"steps": arguments.steps, "seconds": arguments.seconds}
    results: list[ScriptResult] = []
    for name in dict.fromkeys(names):
        result = run_on(script, name, **limits, quiet=arguments.json)
        if result.ending in (endings.RAISED, endings.EXITED):
            return _failed(script, result)
        results.append(result)
    # A test that limits the peak, if the numbers are those of the whole script.
    whole = (endings.STOPPED, endings.ENDED)
    first = next((one for one in results if one.fits and one.ending in whole), None)
    test = None
    if first is not None:
        test = kept_test(script, first.gpu, first.measurements[0], arguments.steps)
    return Answer(
        lines(script, results, test, terminal_width()),
        lambda: {
            "script": script.name,
            "arguments": list(script.arguments),
            "gpus": [_to_dict(result) for result in results],
            "test": test,
        },
        failed=not all(result.fits for result in results),
        problem=next((f"{script.name}: {one.sentence}" for one in results if _is_part(one)), ""),
    )


def _is_part(result: ScriptResult) -> bool:
    """Return whether the numbers are those of the part before an unknown value."""
    return result.ending == endings.UNKNOWN


def _failed(script: Script, result: ScriptResult) -> int:
    """Report how the script failed, after its own output; return the exit code."""
    ended = f"ended with exit code {result.sentence}"
    how = ended if result.ending == endings.EXITED else f"raised {result.sentence}"
    cause = "; it had read a value that is not computed" if result.used_placeholder else ""
    print(f"gpumem: {script.name} {printable(how)} {_when(result)}{cause}", file=sys.stderr)
    return 1


def _when(result: ScriptResult) -> str:
    return f"after {counted(result.steps, 'step')}" if result.steps else "before its first step"


def _prediction(result: ScriptResult) -> Prediction:
    measured, total = result.measurements[0], result.total_memory
    return Prediction.of([measured], result.gpu, total, fits=result.fits)


def _to_dict(result: ScriptResult) -> dict[str, Any]:
    return {
        **_prediction(result).to_dict(),
        "fits": None if _is_part(result) and result.fits else result.fits,
        "simulated": result.measurements[0].simulated,
        "torch": result.torch,
        "ending": result.ending,
        "steps": result.steps,
        "seconds": result.seconds,
        "measurements": [one.to_dict() for one in result.measurements],
        "out_of_memory": result.out_of_memory,
    }


def lines(
    script: Script, results: Sequence[ScriptResult], test: str | None, width: int
) -> Iterator[str]:
    """Yield the lines of output: phases and holders on the first GPU, then which GPUs fit."""
    first = results[0]
    measured = first.measurements[0]
    kind = "a simulated" if measured.simulated else "a dry" if measured.dry else "the"
    ended = {
        endings.STOPPED: f"stopped after {counted(first.steps, 'step')}",
        endings.TIME: f"stopped after {first.seconds:.0f} s, {_when(first)}",
        endings.ENDED: f"ran to its end, {counted(first.steps, 'step')}",
        endings.UNKNOWN: f"stopped at an unknown value, {_when(first)}",
        endings.OUT_OF_MEMORY: f"ran out of memory {_when(first)}",
    }[first.ending]
    yield f"{script.name} on {kind} {first.gpu} (torch {first.torch}): {ended}"
    yield ""
    if post_mortem := first.post_mortem:
        yield from (*post_mortem, first.remedy)
        yield ""
    for index, measured in enumerate(first.measurements):
        if index:
            yield ""
            yield f"{measured.device}:"
        yield from _phase_lines(measured, width)
        yield ""
        yield from _peak_lines(measured, width)
    yield ""
    verdicts = {
        result.gpu: "unknown" if result.fits else "no, it ran out of memory"
        for result in results
        if result.ending == endings.OUT_OF_MEMORY or (_is_part(result) and result.fits)
    }
    yield from fit_table([_prediction(result) for result in results], (), width, verdicts)
    yield ""
    yield CONTEXT
    notes = (note for result in results for one in result.measurements for note in one.notes)
    yield from sentences(f"note: {note}" for note in notes)
    parts = (result.reason for result in results if _is_part(result))
    yield from sentences(f"note: the script was not run any further: {why}" for why in parts)
    if any(result.ending == endings.TIME for result in results):
        yield "note: its time was over, so its peak may be still to come: give more --seconds"
    if test is not None:
        yield from ("", "a test that keeps the number:", "")
        yield from (f"    {line}" for line in test.splitlines())


def _phase_lines(measured: Measurement, width: int) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("phase", "peak", "after", "reserved", "cuBLAS")]
    depths: dict[str | None, int] = {}
    highest: dict[int, int] = defaultdict(int)
    for name, phase in measured.phases.items():
        if (number := iteration_of(name)) is not None:
            highest[number] = max(highest[number], phase.peak_allocated)
    # Of the iterations, show the first two, the one with the highest peak and the last.
    shown = {None, 1, 2, max(highest, key=highest.__getitem__, default=None)}
    shown.add(max(highest, default=None))
    left_out = 0
    for phase in parents_first(measured.phases):
        if iteration_of(phase.name) not in shown:
            left_out += phase.parent is None
            continue
        depths[phase.name] = depth = depths.get(phase.parent, -1) + 1
        sizes = (
            *(phase.peak_allocated, phase.allocated_after),
            *(phase.peak_reserved, phase.cublas_workspace),
        )
        rows.append((f"{'  ' * depth}{phase.name}", *map(format_size, sizes)))
    yield from table(rows, left=(0,), given_up=(4, 3), width=width)
    if left_out:
        yield f"{left_out} iterations between are left out: --json has them"


def _peak_lines(measured: Measurement, width: int) -> Iterator[str]:
    peak = measured.peak_allocated
    # The innermost phase is the most specific one.
    found = [one for one in measured.phases.values() if one.peak_allocated == peak]
    inner = [one for one in found if one.name not in {other.parent for other in found}]
    where = f" in {inner[0].name}" if inner else ""
    totals = sorted(measured.composition.items(), key=lambda item: -item[1])
    held = ", ".join(f"{format_size(size)} {category}" for category, size in totals)
    yield from wrap(f"the peak, {format_size(peak)} ({peak:,} B){where}: {held}", width)
    yield from explanation_lines(measured.sites, signed=False, width=width)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number of steps; give 1 or more")
    return int(text)


COMMAND = Command(
    description="Run a script as it is, with its own arguments, on a simulated GPU, for some steps "
    "of its optimizer; then print its peak memory by phase and by holder, whether it fits, and a "
    "test that limits it to that peak. No GPU is needed. Exit code 1 where it does not fit one of "
    "the GPUs, or fails itself.",
    run=run,
    arguments=(
        Argument(
            "--gpu MODEL...",
            f"model of the catalogue, like T4 or A100-80GB*2, or cuda for a device of this "
            f"machine; may be given several times (default: {DEFAULT_GPU})",
        ),
        DEVICE,
        Argument(
            "--steps N",
            "stop after so many steps of the optimizer that steps first (default: 2)",
            type=_count,
            default=2,
        ),
        Argument(
            "--seconds S",
            "stop after so many seconds at the latest (default: 60)",
            type=above_zero("seconds"),
            default=60.0,
        ),
        Argument("-m", "SCRIPT is a module, as for python -m", dest="module"),
        Argument("script SCRIPT", "as after python; options of gpumem come before it"),
        Argument(
            "arguments ARGS",
            "the script's own arguments: everything after it",
            nargs=argparse.REMAINDER,
        ),
    ),
    examples=(
        "gpumem run train.py --batch-size 32",
        "gpumem run --gpu T4 --gpu A100-80GB --steps 3 -m mypackage.train config.yaml",
    ),
    json="print everything as JSON, sizes in bytes; the script's output goes to stderr",
    prints_output=True,
)
