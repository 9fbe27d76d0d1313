"""What a program would need on a GPU that is not there: it runs on the simulated one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pytest_gpumem.measurement.record import CALL, SETUP
from pytest_gpumem.prediction.child import UNBOUNDED
from pytest_gpumem.prediction.predicted import Prediction
from pytest_gpumem.prediction.process import Answer, PredictionError, run_tests
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, Machine, find_gpu
from pytest_gpumem.simulated.run import SimulatedRun, simulate


def predict(call: Callable[[], Any], gpu: str) -> Prediction:
    """Run ``call`` on a simulated ``gpu`` and say what it took.

    Raises ``ValueError`` for a model that is not in the catalogue, and what ``call`` raises, but
    for running out of memory.
    """
    model = find_gpu(gpu)
    fits, run = _ran(call, model)
    if not fits:
        _, run = _ran(call, replace(model, total_memory=UNBOUNDED))
    return Prediction(
        gpu=model.name,
        total_memory=model.total_memory,
        fits=fits,
        peak_allocated=run.peak_allocated,
        peak_reserved=run.peak_reserved,
        phases={name: phase.peak_allocated for name, phase in run.phases.items()},
        notes=run.notes,
    )


def _ran(call: Callable[[], Any], model: GpuModel) -> tuple[bool, SimulatedRun]:
    with simulate(model) as run:
        try:
            with run.finding_phases():
                call()
        except torch.OutOfMemoryError:
            return False, run
    return True, run


def predict_test(nodeid: str, gpus: Sequence[str]) -> list[Prediction]:
    """Run a test on simulated GPUs, in a process of its own; return what it took on each.

    Limits and baselines do not matter, nor does the model that its marker names. Raises
    ``ValueError`` for a model that is not in the catalogue, :class:`PredictionError` where
    ``nodeid`` is not one test, or does not run there.
    """
    models = {model.name: model for model in map(find_gpu, gpus)}
    try:
        answers = run_tests(
            [nodeid], [Machine(model, 1) for model in models.values()], unbounded=True
        )
    except PredictionError as error:
        raise PredictionError(f"{nodeid} was not run: {error}") from error
    tests = list(dict.fromkeys(answer.nodeid for answer in answers))
    if len(tests) > 1:
        raise PredictionError(
            f"{nodeid} names {len(tests)} tests; give one of them, like {min(tests)}"
        )
    return [_of_test(models[answer.gpu], answer) for answer in answers]


def _of_test(model: GpuModel, answer: Answer) -> Prediction:
    if not answer.measured or answer.record is None or answer.record.measurement is None:
        why = answer.problem or "it allocates nothing on the device"
        sentence = f"{answer.nodeid} cannot be predicted for {model.name}: {why}"
        raise PredictionError(sentence, answer.kernel, answer.snippet)
    measured = answer.record.measurement
    return Prediction(
        gpu=model.name,
        total_memory=model.total_memory,
        fits=answer.fits,
        peak_allocated=measured.peak_allocated,
        peak_reserved=measured.peak_reserved,
        phases={
            name: phase.peak_allocated
            for name, phase in measured.phases.items()
            if name not in (SETUP, CALL)
        },
        notes=measured.notes,
    )
