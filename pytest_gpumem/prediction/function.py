"""The memory of a function: on a simulated GPU, or on the CUDA device of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pytest_gpumem.attribution.composition import Composition
from pytest_gpumem.device.cuda import CudaDevice, find_device
from pytest_gpumem.dry.load import MODELS, is_loaded
from pytest_gpumem.measurement.fixtures import FixtureLedger
from pytest_gpumem.measurement.meter import Meter
from pytest_gpumem.measurement.statistics import CudaStatistics
from pytest_gpumem.prediction.child import UNBOUNDED
from pytest_gpumem.prediction.compiled import Mode
from pytest_gpumem.simulated.compiled.entry import AUTO
from pytest_gpumem.simulated.distributed.worst import Taken, Worst
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, find_gpu
from pytest_gpumem.simulating import SimulatedRun, simulate
from pytest_gpumem.values.measurement import CALL
from pytest_gpumem.values.prediction import Prediction
from pytest_gpumem.values.world import World, world_of


def predict(
    call: Callable[[], Any], gpu: str, *, ranks: int | None = None, mode: Mode | None = None
) -> Prediction:
    """Run ``call`` on a simulated ``gpu`` and return its memory.

    A ``mode`` is added to the result, with the live blocks at the peaks. With a number of ``ranks``
    it is run as those of them that may differ, and the result is that of the largest. Raises
    ``ValueError`` for a model that is not in the catalogue, or an impossible number of ranks, and
    what ``call`` raises, but for running out of memory.
    """
    model = find_gpu(gpu)
    if ranks is None:
        return _predicted(call, model, None, mode)
    worst = Worst(ranks)
    found = {}
    rank: int | None = 0
    while rank is not None:
        worst.rank = rank
        found[rank] = _predicted(call, model, world_of(ranks, rank), mode, worst)
        rank = worst.unknown()
    most = found[worst.found]
    return replace(
        most, ranks=f"rank {worst.found} of {ranks}", notes=(*most.notes, worst.sentence)
    )


def _predicted(
    call: Callable[[], Any],
    model: GpuModel,
    world: World | None,
    mode: Mode | None,
    worst: Worst | None = None,
) -> Prediction:
    fits, run, held = _ran(call, model, world, mode)
    if not fits:
        _, run, held = _ran(call, replace(model, total_memory=UNBOUNDED), world, mode)
    if worst is not None:
        worst.note(Taken(run.peak_allocated, run.events))
    prediction = Prediction(
        gpu=model.name,
        total_memory=model.total_memory,
        fits=fits,
        peak_allocated=run.peak_allocated,
        peak_reserved=run.peak_reserved,
        phases={name: phase.peak_allocated for name, phase in run.phases.items() if name != CALL},
        notes=(*run.notes, *filter(None, [run.nccl])),
    )
    if mode is None:
        return prediction
    sites = {
        "" if name == CALL else name: [site.to_dict() for site in composition.sites]
        for name, composition in held.items()
    }
    return replace(prediction, code=mode.code, sites={"": [], **sites})


def _ran(
    call: Callable[[], Any], model: GpuModel, world: World | None, mode: Mode | None
) -> tuple[bool, SimulatedRun, Mapping[str, Composition]]:
    """Return whether it fits, the run and, in a ``mode``, the live blocks at its peaks."""
    size, rank = (None, 0) if world is None else (world.size, world.rank)
    compile = AUTO if mode is None else mode.compile
    found: dict[str, Composition] = {}
    with simulate(model, world_size=size, rank=rank, compile=compile) as run:
        try:
            if mode is None:
                with run.finding_phases():
                    call()
            else:
                with mode.applied(), run.composing(CALL, str(Path.cwd())) as found:
                    call()
        except torch.OutOfMemoryError:
            return False, run, {}
    return True, run, found


def device_here() -> CudaDevice:
    """Return this process's CUDA device; raises ``DeviceError`` where torch sees none."""
    if is_loaded():
        from pytest_gpumem.device.dry import DryDevice

        return DryDevice(os.environ[MODELS])
    found = find_device(None, required=True)
    assert found is not None
    return found


def predict_measured(name: str, call: Callable[[], Any]) -> Prediction:
    """Run ``call``, of that ``name``, and return its memory; raises what it raises.

    Where it runs out of memory the prediction is that it does not fit, with the bytes up to then.
    """
    device = device_here()
    fits = True
    with ExitStack() as resources:
        resources.enter_context(device.active())
        resources.enter_context(device.measuring(name))
        statistics = CudaStatistics(device.workspaces)
        resources.enter_context(statistics.screened())
        meter = Meter(statistics, FixtureLedger())
        device.begin_test(name, (), lambda *_: None)
        with meter.running(()), meter.watching():
            device.restart_collector()
            try:
                call()
            except torch.OutOfMemoryError:
                fits = False
        found = meter.measurements((), (), device=device.index, passed=False)[device.index]
        return Prediction.of(
            device.complete(found), device.environment.gpu, device.total_memory, fits=fits
        )
