"""The memory of a program on a GPU that is not present: it runs on the simulated one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pytest_gpumem.attribution.composition import Composition
from pytest_gpumem.prediction.child import UNBOUNDED
from pytest_gpumem.prediction.compiled import Mode
from pytest_gpumem.simulated.compiled.entry import AUTO
from pytest_gpumem.simulated.distributed.worst import RankPeak, Worst
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
        worst.note(RankPeak(run.peak_allocated, run.events_hash))
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
