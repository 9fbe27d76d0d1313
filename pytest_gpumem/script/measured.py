"""A run of a script on a device, from its first line until it ends or is ended."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch

from pytest_gpumem.attribution.out_of_memory import OutOfMemory
from pytest_gpumem.device.device import Device
from pytest_gpumem.device.simulated import SimulatedDevice
from pytest_gpumem.measurement.composition import Account
from pytest_gpumem.measurement.fixtures import FixtureLedger
from pytest_gpumem.measurement.meter import Meter
from pytest_gpumem.measurement.recorded import RecordedHistory
from pytest_gpumem.measurement.recorder import Recorder
from pytest_gpumem.measurement.statistics import CudaStatistics
from pytest_gpumem.script.entry import Script, chain
from pytest_gpumem.script.files import checkpoints_kept
from pytest_gpumem.script.phases import Iterations, shown_phases
from pytest_gpumem.script.stopping import Alarm, Steps
from pytest_gpumem.values.measurement import Measurement

STACKS = "all"
"""The recorded stacks of a real device's allocations: Python's and C++'s."""


@dataclass(frozen=True)
class Run:
    """The result of one run."""

    error: BaseException | None
    """The exception that the script ended with; ``None`` where it ran to its last line."""
    steps: int
    time_is_over: bool
    seconds: float
    measurement: Measurement
    """The measurement of the requested device."""
    others: tuple[Measurement, ...]
    """The measurements of other devices that the script used."""
    out_of_memory: OutOfMemory | None


class _Meter(Meter):
    """A meter whose phases are iterations of a script."""

    tracker: Iterations

    def _tracker(self) -> Iterations:
        assert self._account is not None
        return Iterations(self._statistics, self._account.positions)


def run_measured(
    script: Script,
    device: Device,
    resources: ExitStack,
    *,
    steps: int,
    seconds: float,
    note: str = "",
) -> Run:
    """Run ``script`` on ``device``, for ``steps`` steps of its optimizer and ``seconds`` at most.

    ``note`` is added to its numbers. The device is active until ``resources`` are closed: exit
    handlers of the script need it.
    """
    resources.enter_context(device.active())
    resources.enter_context(device.measuring(script.name))
    statistics = CudaStatistics(device.workspaces)
    resources.enter_context(statistics.screened())
    account = Account(_recorder(device, resources), os.getcwd())  # noqa: PTH109 - a string
    meter = _Meter(statistics, FixtureLedger(), account)
    device.begin_test(script.name, (), lambda *_: None)
    counter = Steps(steps, lambda more: meter.tracker.iterated(more=more))
    alarm = Alarm(seconds)
    begin = time.monotonic()
    error: BaseException | None = None
    with meter.running(()):
        meter.tracker.load()
        try:
            with _files_kept(device), meter.watching(), counter.counted(), alarm.set():
                device.restart_collector()
                script.run()
            device.end_body()
        except BaseException as raised:
            error = raised
        meter.tracker.iterated(more=False)
    taken = time.monotonic() - begin
    found = meter.measurements((), (), device=device.index, passed=False)
    done = counter.count
    measured = {index: _completed(one, device, done, note) for index, one in found.items()}
    own = measured.pop(device.index)
    return Run(
        error,
        done,
        alarm.rang,
        taken,
        own,
        tuple(one for one in measured.values() if one.peak_allocated > 0),
        _post_mortem(meter, device) if is_out_of_memory(error) else None,
    )


def _recorder(device: Device, resources: ExitStack) -> Recorder:
    if device.recorder is not None:
        return device.recorder
    recorder = RecordedHistory()
    resources.enter_context(recorder.during(STACKS))
    return recorder


def _files_kept(device: Device) -> AbstractContextManager[None]:
    if isinstance(device, SimulatedDevice) and not device.has_values:
        return checkpoints_kept(device.note)
    return nullcontext()


def _completed(measurement: Measurement, device: Device, steps: int, note: str) -> Measurement:
    phases = shown_phases(measurement.phases, steps)
    completed = device.complete(replace(measurement, phases=phases))
    return replace(completed, notes=(note, *completed.notes)) if note else completed


def _post_mortem(meter: Meter, device: Device) -> OutOfMemory | None:
    major, minor = (int(part) for part in device.environment.torch.split(".")[:2])
    return meter.out_of_memory(device.index, total=device.total_memory, version=(major, minor))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` is, or was caused by, an allocation that found no memory."""
    return any(isinstance(one, torch.OutOfMemoryError) for one in chain(error))
