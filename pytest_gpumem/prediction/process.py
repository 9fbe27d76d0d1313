"""Tests on GPUs that are not present: they run on simulated ones, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.prediction.child import ANSWER, INI, RAN_OUT, REQUEST, UNBOUNDED, Request
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, Machine, find_gpu
from pytest_gpumem.values.prediction import Prediction
from pytest_gpumem.values.serialization import Plain

if TYPE_CHECKING:
    from pytest_gpumem.prediction.compiled import Mode


class PredictionError(ValueError):
    """A program that cannot be predicted; the message is one sentence for the user."""


@dataclass(frozen=True)
class MachineResult(Plain):
    """The result of one test on one simulated machine."""

    nodeid: str
    gpu: str
    record: TestRecord | None
    """The test's record; ``None`` where it was not measured."""
    fits: bool
    """Whether memory sufficed; if not, it ran again with unlimited memory, if requested."""
    problem: str
    """The reason of a skip or failure; where only a verdict failed it, its numbers are valid."""

    @property
    def ran_out(self) -> bool:
        """Whether it ended because memory did not suffice."""
        return self.problem == RAN_OUT

    @property
    def measured(self) -> bool:
        """Whether the body ran to its end on the device."""
        record = self.record
        return record is not None and (record.judged or record.outcome == "passed")


def run_tests(
    tests: Sequence[str],
    machines: Sequence[Machine],
    *,
    arguments: Sequence[str] = (),
    folder: Path | None = None,
    unbounded: bool = False,
    options: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    modules_compiled: bool = False,
    dry: bool = False,
) -> list[MachineResult]:
    """Run ``tests`` on each of ``machines``; the caller's process is not changed.

    ``tests`` are node ids relative to ``folder``, or with absolute paths; ``arguments`` are those
    of the calling pytest, and ``options`` values of its ``config.option``, by name. With
    ``unbounded`` a test that runs out of memory runs again with unlimited memory. After so many
    ``seconds`` no other test begins, and a running one gets as long again. With
    ``modules_compiled`` each module that a test calls is compiled. Raises :class:`PredictionError`
    where pytest does not get as far as running tests. With ``dry`` each machine is a dry device, in
    a process of its own, which takes neither ``options`` nor ``seconds``.
    """
    if not dry:
        request = Request(
            tuple(tests),
            tuple(machines),
            unbounded=unbounded,
            options=dict(options or {}),
            seconds=seconds,
            modules_compiled=modules_compiled,
        )
        return _answers(request, arguments, folder)
    from pytest_gpumem.dry.load import environment_of_option

    found = []
    for machine in machines:
        request = Request(tuple(tests), (machine,), dry=True)
        for answer in _answers(
            request, arguments, folder, environment_of_option(machine.model.name)
        ):
            if unbounded and answer.ran_out:
                again = replace(request, tests=(answer.nodeid,))
                (large,) = _answers(
                    again, arguments, folder, environment_of_option(machine.model.name, UNBOUNDED)
                )
                answer = replace(large, fits=False)
            found.append(answer)
    return found


def _answers(
    request: Request,
    arguments: Sequence[str],
    folder: Path | None,
    variables: Mapping[str, str] | None = None,
) -> list[MachineResult]:
    """Return the answers of a process with these environment ``variables`` to ``request``."""
    seconds = request.seconds
    with tempfile.TemporaryDirectory() as temporary:
        own = Path(temporary)
        request.to_file(own / "request.json")
        # Only tests follow ``--``.
        given = list(arguments)
        end = given.index("--") if "--" in given else len(given)
        options = ["-p", "pytest_gpumem.prediction.child"]
        for setting in (f"cache_dir={own / 'cache'}", *INI):
            options += ["-o", setting]
        try:
            ran = subprocess.run(
                [sys.executable, "-m", "pytest", *given[:end], *options, *given[end:]],
                cwd=folder,
                env={**os.environ, **(variables or {}), REQUEST: str(own / "request.json")},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=None if seconds is None else 2 * seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise PredictionError(f"it takes longer than {2 * (seconds or 0):.0f} s") from error
        answer = own / ANSWER
        found = json.loads(answer.read_bytes()) if answer.is_file() else []
    if not found:
        raise PredictionError(last_words(ran))
    return [MachineResult.from_dict(answer) for answer in found]


def last_words(ran: subprocess.CompletedProcess[str]) -> str:
    """Return pytest's first error, else its last line."""
    lines = [line.strip() for line in (*ran.stderr.splitlines(), *ran.stdout.splitlines())]
    written = [line for line in lines if line.strip("= ")]
    # Headings, as "==== ERRORS ====", have their signs still.
    errors = [line for line in written if line.startswith(("ERROR", "E  ", "FAILED"))]
    last = errors or written[-1:] or [f"pytest ended with code {ran.returncode}"]
    return last[0].strip("= ")


def predict_test(
    nodeid: str, gpus: Sequence[str], *, mode: Mode | None = None, dry: bool = False
) -> list[Prediction]:
    """Run a test on simulated or ``dry`` GPUs, in a process of its own; return the result for each.

    A ``mode`` is added to the result, with the live blocks at the peaks.
    Limits and baselines do not matter, nor does the model that its marker names. Raises
    ``ValueError`` for a model that is not in the catalogue, :class:`PredictionError` where
    ``nodeid`` is not one test, or does not run there.
    """
    models = {model.name: model for model in map(find_gpu, gpus)}
    try:
        answers = run_tests(
            [nodeid],
            [Machine(model, 1) for model in models.values()],
            arguments=[] if mode is None else [f"--gpumem-sim-compile={mode.compile}"],
            unbounded=True,
            modules_compiled=mode is not None and mode.modules,
            dry=dry,
        )
    except ValueError as error:
        raise PredictionError(f"{nodeid} was not run: {error}") from error
    tests = {answer.nodeid for answer in answers}
    if len(tests) > 1:
        raise PredictionError(
            f"{nodeid} names {len(tests)} tests; give one of them, like {min(tests)}"
        )
    return [_prediction(models[answer.gpu], answer, mode) for answer in answers]


def _prediction(model: GpuModel, answer: MachineResult, mode: Mode | None) -> Prediction:
    if not answer.measured or answer.record is None or answer.record.measurement is None:
        why = answer.problem or "it allocates nothing on the device"
        raise PredictionError(f"{answer.nodeid} cannot be predicted for {model.name}: {why}")
    measured = answer.record.measurement
    code = mode.code if mode else ""
    return Prediction.of(measured, model.name, model.total_memory, fits=answer.fits, code=code)
