"""The memory of a function on the CUDA device of this process, real or dry."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from traceback import clear_frames
from typing import Any, TypeVar

import torch

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.device.cuda import CudaDevice, find_device
from pytest_gpumem.device.device import ComputingDevice
from pytest_gpumem.dry.load import MODELS, is_loaded
from pytest_gpumem.measurement.fixtures import FixtureRecords
from pytest_gpumem.measurement.meter import Meter
from pytest_gpumem.measurement.statistics import CudaStatistics
from pytest_gpumem.options import VALUES_LIMIT
from pytest_gpumem.values.errors import UnknownValueError
from pytest_gpumem.values.prediction import Prediction

T = TypeVar("T")


def device_here(computed: ValueLevel = ValueLevel.AT_FIRST) -> CudaDevice:
    """Return this process's CUDA device; raises ``DeviceError`` where torch sees none.

    A dry one has the ``computed`` values.
    """
    if is_loaded():
        from pytest_gpumem.device.dry import DryDevice

        return DryDevice(os.environ[MODELS], computed)
    found = find_device(None, required=True)
    assert found is not None
    return found


def on_this_device(name: str, run: Callable[[CudaDevice], T]) -> T:
    """Return the result of ``run`` with this process's CUDA device, which is active inside.

    The device knows it by ``name``. Where it depends on a value that a dry device has not computed,
    it runs again with more values; raises ``WorkLimitError`` where these take longer than a test's.
    """
    device = device_here()
    while True:
        try:
            with device.active():
                device.begin_test(name, (), lambda *_: None)
                if isinstance(device, ComputingDevice):
                    device.work.bound(VALUES_LIMIT)
                found = run(device)
        except BaseException as error:
            further = _further(device, error)
            if further is None:
                raise
            clear_frames(error.__traceback__)
        else:
            further = _further(device)
            if further is None:
                return found
        device = device_here(further)


def _further(device: CudaDevice, error: BaseException | None = None) -> ValueLevel | None:
    """Return the values that a run needed and ``device`` has not; ``None`` for none."""
    if not isinstance(device, ComputingDevice):
        return None
    if error is not None and not isinstance(error, (Exception, UnknownValueError)):
        return None  # an interruption
    return device.next_level if device.reason_to_rerun(error, failed=error is not None) else None


def predict_measured(name: str, call: Callable[[], Any]) -> Prediction:
    """Run ``call``, of that ``name``, and return its memory; raises what it raises.

    Where it runs out of memory the prediction is that it does not fit, with the bytes up to then.
    """
    return on_this_device(name, lambda device: _predicted(device, name, call))


def _predicted(device: CudaDevice, name: str, call: Callable[[], Any]) -> Prediction:
    fits = True
    with ExitStack() as resources:
        resources.enter_context(device.measuring(name))
        statistics = CudaStatistics(device.workspaces)
        resources.enter_context(statistics.own_peaks_shown())
        meter = Meter(statistics, FixtureRecords())
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
