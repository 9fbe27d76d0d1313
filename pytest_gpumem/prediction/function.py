"""The memory of a function: on a simulated GPU, or on this process's CUDA device, real or dry.

A program can also be run twice: as eager code, and compiled by ``torch.compile``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from traceback import clear_frames
from typing import Any, TypeVar

import torch

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.device.cuda import CudaDevice, find_device
from pytest_gpumem.device.device import ComputingDevice, Device
from pytest_gpumem.device.simulated import SimulatedDevice
from pytest_gpumem.dry.load import MODELS, is_loaded
from pytest_gpumem.measurement.composition import PeakRecorder
from pytest_gpumem.measurement.fixtures import FixtureRecords
from pytest_gpumem.measurement.meter import Meter
from pytest_gpumem.measurement.statistics import CudaStatistics
from pytest_gpumem.options import VALUES_LIMIT
from pytest_gpumem.prediction.process import (
    AS_IT_IS,
    COMPILED,
    EAGER,
    UNBOUNDED,
    Mode,
    modules_compiled,
)
from pytest_gpumem.simulated.compiled.entry import AUTO
from pytest_gpumem.simulated.compiled.settings import tell_of_compiled_code
from pytest_gpumem.simulated.distributed.worst import RankPeak, Worst
from pytest_gpumem.simulated.gpu.catalogue import Machine, find_machine
from pytest_gpumem.values.errors import HostMemoryError, UnknownValueError, WorkLimitError
from pytest_gpumem.values.prediction import Prediction
from pytest_gpumem.values.world import RequestedRank

MEASURED = "cuda"
"""The name of this process's CUDA device, in place of a model to simulate."""

T = TypeVar("T")


def device_here(computed: ValueLevel = ValueLevel.AT_FIRST) -> CudaDevice:
    """Return this process's CUDA device; raises ``DeviceError`` if torch sees none.

    A dry device computes values of the level ``computed``.
    """
    if is_loaded():
        from pytest_gpumem.device.dry import DryDevice

        return DryDevice(os.environ[MODELS], computed)
    found = find_device(None, required=True)
    assert found is not None
    return found


def several_here() -> str:
    """Return the names of this process's dry GPUs, as ``H100*2``; empty if there is one or none."""
    models = os.environ[MODELS] if is_loaded() else ""
    return models if "*" in models or "," in models else ""


def on_device(
    gpu: str | Machine,
    name: str,
    run: Callable[[Device], T],
    *,
    compile: str = AUTO,
    requested: RequestedRank | None = None,
) -> T:
    """Return the result of ``run`` with the device of ``gpu``, which is active inside.

    ``name`` names the run. If it depends on a value that the device has not computed, it runs again
    with more values; raises ``WorkLimitError`` if computing them takes longer than the limit.
    """
    computed, reason = ValueLevel.AT_FIRST, None
    while True:
        device: Device
        if gpu == MEASURED:
            device = device_here(computed)
        else:
            everything = computed is ValueLevel.ALL
            device = SimulatedDevice(
                gpu, real_values=everything, compile=compile, requested=requested
            )
        computing = device if isinstance(device, ComputingDevice) else None
        error = None
        try:
            with device.active():
                device.begin_test(name, (), lambda *_: None)
                if computing:
                    computing.work.bound(VALUES_LIMIT)
                with device.measuring(name):
                    device.restart_collector()
                    found = run(device)
        except (HostMemoryError, WorkLimitError) as limit:
            raise (type(limit)(f"{reason}; and {limit}") if reason else limit) from None
        except (Exception, UnknownValueError) as failure:
            error = failure
        level = reason = None
        if computing:
            level = computing.next_level
            reason = computing.reason_to_rerun(error, failed=error is not None)
        if not reason or level is None:
            if error is not None:
                raise error
            return found
        if error is not None:
            clear_frames(error.__traceback__)
        if level is ValueLevel.ALL and computing and computing.work.seconds > VALUES_LIMIT:
            raise WorkLimitError(
                f"{reason}; and computing values on the CPU takes at least "
                f"{computing.work.seconds:,.0f} s, more than {VALUES_LIMIT:g} s"
            ) from error
        computed = level


def predict(
    call: Callable[[], Any],
    gpu: str,
    *,
    name: str = "",
    ranks: int | None = None,
    mode: Mode = AS_IT_IS,
) -> Prediction:
    """Run ``call``, of that ``name``, on a simulated ``gpu`` and return its memory.

    ``"cuda"`` is this process's CUDA device; if memory runs out there, the bytes are those until
    then. A ``mode`` is added to the result, with the live blocks at the peaks. With ``ranks`` the
    call runs as each rank that may differ, and the result is that with the highest peak. Raises
    ``ValueError`` for a model that is not in the catalogue or an impossible number of ranks, and
    exceptions of ``call`` except for running out of memory.
    """
    machine = gpu if gpu == MEASURED else find_machine(gpu)
    if ranks is None:
        return _on(machine, call, name, mode, None)
    worst = Worst(ranks)
    found = {}
    rank: int | None = 0
    while rank is not None:
        worst.rank = rank
        found[rank] = _on(machine, call, name, mode, worst)
        rank = worst.unknown()
    most = found[worst.found]
    return replace(
        most, ranks=f"rank {worst.found} of {ranks}", notes=(*most.notes, worst.sentence)
    )


def _on(
    gpu: str | Machine, call: Callable[[], Any], name: str, mode: Mode, worst: Worst | None
) -> Prediction:
    def run(device: Device) -> Prediction:
        machine = gpu.name if isinstance(gpu, Machine) else several_here()
        found = _predicted(device, machine, name, call, mode)
        if worst is not None and isinstance(device, SimulatedDevice):
            worst.note(RankPeak(found.peak_allocated, device.events_hash))
        return found

    found = on_device(
        gpu,
        name,
        run,
        compile=mode.compile,
        requested=None if worst is None else RequestedRank(worst.size, worst.rank),
    )
    if found.fits or not isinstance(gpu, Machine):
        return found
    unbounded = Machine(replace(gpu.model, total_memory=UNBOUNDED), gpu.count)
    large = _on(unbounded, call, name, mode, worst)
    return replace(large, fits=False, total_memory=gpu.model.total_memory)


def _predicted(
    device: Device, gpu: str, name: str, call: Callable[[], Any], mode: Mode
) -> Prediction:
    fits, recorder = True, None
    if mode.code and device.recorder is not None:
        recorder = PeakRecorder(device.recorder, str(Path.cwd()))
    statistics = CudaStatistics(device.workspaces)
    compiled = modules_compiled() if mode.modules else nullcontext()
    with statistics.own_peaks_shown(), compiled:
        meter = Meter(statistics, FixtureRecords(), recorder)
        with meter.running(()), meter.watching():
            device.restart_collector()
            try:
                call()
            except torch.OutOfMemoryError:
                fits = False
            else:
                device.end_body()
        found = meter.measurements((), (), device=device.index, passed=False)
    measured = [device.complete(one) for one in found.values()]
    total, gpu = device.total_memory, gpu or device.environment.gpu
    predicted = Prediction.of(measured, gpu, total, fits=fits, code=mode.code)
    if isinstance(device, SimulatedDevice) and (sentence := device.nccl):
        return replace(predicted, notes=(*predicted.notes, sentence))
    return predicted


Pairs = tuple[tuple[Prediction, Prediction], ...]
"""Results for each GPU and each number of ranks: of eager code, of compiled code."""


def compare(predicting: Callable[[Mode], Sequence[Prediction]]) -> tuple[Pairs, bool]:
    """Predict a program as eager code and compiled; return also whether it compiles by itself.

    If it calls ``torch.compile``, that code is compiled, else every outermost module, as
    ``Module.compile()`` does.
    """
    eager = predicting(Mode(EAGER))
    by_itself = any(tell_of_compiled_code(one.notes) for one in eager)
    compiled = predicting(Mode(COMPILED, modules=not by_itself))
    return tuple(zip(eager, compiled, strict=True)), by_itself
