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
from pytest_gpumem.simulated.distributed.world import World, world_of
from pytest_gpumem.simulated.distributed.worst import Taken, Worst
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, Machine, find_gpu
from pytest_gpumem.simulated.run import SimulatedRun, simulate


def predict(call: Callable[[], Any], gpu: str, *, ranks: int | None = None) -> Prediction:
    """Run ``call`` on a simulated ``gpu`` and say what it took.

    With a number of ``ranks`` it is run as those of them that may differ, and the one that takes
    most is told. Raises ``ValueError`` for a model that is not in the catalogue, or a number of
    ranks that there cannot be, and what ``call`` raises, but for running out of memory.
    """
    model = find_gpu(gpu)
    if ranks is None:
        return _predicted(call, model, None)
    worst = Worst(ranks)
    found = {}
    rank: int | None = 0
    while rank is not None:
        worst.rank = rank
        found[rank] = _predicted(call, model, world_of(ranks, rank), worst)
        rank = worst.unknown()
    most = found[worst.found]
    return replace(
        most, ranks=f"rank {worst.found} of {ranks}", notes=(*most.notes, worst.sentence)
    )


def _predicted(
    call: Callable[[], Any], model: GpuModel, world: World | None, worst: Worst | None = None
) -> Prediction:
    fits, run = _ran(call, model, world)
    if not fits:
        _, run = _ran(call, replace(model, total_memory=UNBOUNDED), world)
    if worst is not None:
        worst.note(Taken(run.peak_allocated, run.events))
    return Prediction(
        gpu=model.name,
        total_memory=model.total_memory,
        fits=fits,
        peak_allocated=run.peak_allocated,
        peak_reserved=run.peak_reserved,
        phases={name: phase.peak_allocated for name, phase in run.phases.items()},
        notes=run.notes,
    )


def _ran(
    call: Callable[[], Any], model: GpuModel, world: World | None
) -> tuple[bool, SimulatedRun]:
    size, rank = (None, 0) if world is None else (world.size, world.rank)
    with simulate(model, world_size=size, rank=rank) as run:
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
        raise PredictionError(f"{answer.nodeid} cannot be predicted for {model.name}: {why}")
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
