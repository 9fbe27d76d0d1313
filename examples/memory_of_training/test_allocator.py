"""The memory of one tensor."""

from __future__ import annotations

import sys

import pytest
import torch

from examples.memory_of_training.experiments import (
    bytes_per_element,
    device_use,
    reserved_and_allocated,
    staircase,
    tensor_of,
)
from pytest_gpumem.measurement.nvml import NvmlAbsent


def test_reserved_stays_when_a_tensor_goes(recorded_gpu: None) -> None:
    assert reserved_and_allocated() == {
        "start": (0, 0),
        "tensor": (2_097_152, 4_096),
        "deleted": (2_097_152, 0),
        "cache emptied": (0, 0),
    }


@pytest.mark.gpumem(max=4_096, max_reserved="2MiB", max_leak=0, baseline=False)
def test_1024_floats() -> None:
    assert torch.randn(1024, device="cuda").is_cuda


@pytest.mark.gpumem(max="8KiB", max_leak=0, baseline=False)
def test_bytes_per_element() -> None:
    assert bytes_per_element() == {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "int32": 4,
        "int64": 8,
        "uint8": 1,
        "int8": 1,
        "uint16": 2,
    }


@pytest.mark.gpumem(max="3.5KiB", max_leak=0, baseline=False)
def test_800_floats() -> None:
    assert tensor_of(800) == 3_584  # seven blocks, not 3,200 bytes


@pytest.mark.gpumem(max="4.5KiB", max_leak=0, baseline=False)
def test_staircase() -> None:
    steps = staircase()
    assert steps[0] == 0
    assert steps[1:129] == [512] * 128
    assert steps[129:257] == [1_024] * 128
    assert steps[1_025:1_050] == [4_608] * 25


def test_nvml_sees_the_whole_device() -> None:
    use = device_use()
    if isinstance(use, NvmlAbsent):
        pytest.skip(use.reason)
    assert 0 < use.used <= use.total
    is_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    if is_in_use and use.process_used is not None:
        # The CUDA context alone takes hundreds of megabytes.
        assert use.used >= use.process_used > torch.cuda.memory_reserved()


class NvmlWithoutDriver:
    class NVMLError(Exception):
        value = 9

    def nvmlInit(self) -> None:  # noqa: N802 - the name in pynvml
        raise self.NVMLError


def test_without_a_driver_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", NvmlWithoutDriver())
    assert device_use() == NvmlAbsent("the NVIDIA driver is not loaded")
