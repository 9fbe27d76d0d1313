"""The memory of a function on the CUDA device of this process, real or dry."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from pytest_gpumem.device.cuda import CudaDevice, find_device
from pytest_gpumem.dry.load import MODELS, is_loaded
from pytest_gpumem.measurement.fixtures import FixtureLedger
from pytest_gpumem.measurement.meter import Meter
from pytest_gpumem.measurement.statistics import CudaStatistics
from pytest_gpumem.values.prediction import Prediction


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
