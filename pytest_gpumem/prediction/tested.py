"""The memory of a test on a GPU that is not present: it runs in a process with a simulated one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.prediction.process import Answer, PredictionError, run_tests
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, Machine, find_gpu
from pytest_gpumem.values.measurement import CALL, SETUP
from pytest_gpumem.values.prediction import Prediction

if TYPE_CHECKING:
    from pytest_gpumem.prediction.compiled import Mode


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
    except PredictionError as error:
        raise PredictionError(f"{nodeid} was not run: {error}") from error
    tests = list(dict.fromkeys(answer.nodeid for answer in answers))
    if len(tests) > 1:
        raise PredictionError(
            f"{nodeid} names {len(tests)} tests; give one of them, like {min(tests)}"
        )
    return [_of_test(models[answer.gpu], answer, mode) for answer in answers]


def _of_test(model: GpuModel, answer: Answer, mode: Mode | None) -> Prediction:
    if not answer.measured or answer.record is None or answer.record.measurement is None:
        why = answer.problem or "it allocates nothing on the device"
        sentence = f"{answer.nodeid} cannot be predicted for {model.name}: {why}"
        raise PredictionError(sentence)
    measured = answer.record.measurement
    prediction = Prediction(
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
    if mode is None:
        return prediction
    sites = {name: phase.sites for name, phase in measured.phases.items()}
    return replace(prediction, code=mode.code, sites={**sites, "": measured.sites})
