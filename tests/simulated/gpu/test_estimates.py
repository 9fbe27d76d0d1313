"""Estimated sizes: their bytes at the peak are counted for the reports' note."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.gpu.estimates import Estimates


class Device:
    """A counter of allocated bytes and their peak."""

    def __init__(self) -> None:
        self.allocated = self.peak_allocated = 0
        memory: Any = self
        self.estimates = Estimates(memory)

    def take(self, nbytes: int, estimated: bool = False) -> None:
        self.allocated += nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        if estimated:
            self.estimates.taken(nbytes, "a workspace")

    def give(self, nbytes: int, estimated: bool = False) -> None:
        self.allocated -= nbytes
        if estimated:
            self.estimates.freed(nbytes)


def test_only_estimates_that_are_live_at_the_peak_count() -> None:
    device = Device()
    device.take(100)
    device.take(30, estimated=True)
    assert device.estimates.in_peak == 30
    device.give(30, estimated=True)
    device.take(40)
    assert device.estimates.in_peak == 0
    device.take(5, estimated=True)
    device.take(6)
    assert device.estimates.in_peak == 5
    device.give(5, estimated=True)
    device.give(40)
    assert device.estimates.in_peak == 5


def test_a_peak_before_the_first_estimate_has_no_estimated_bytes() -> None:
    device = Device()
    device.take(100)
    device.give(50)
    device.take(10, estimated=True)
    assert device.estimates.in_peak == 0


def test_estimates_follow_a_peak_that_is_reset() -> None:
    device = Device()
    device.take(100)
    device.take(10, estimated=True)
    device.give(10, estimated=True)
    device.peak_allocated = device.allocated
    device.take(4, estimated=True)
    assert device.estimates.in_peak == 10  # of the highest peak, before the reset
    device.estimates.clear()
    device.take(1)
    assert device.estimates.in_peak == 4


def test_workspace_of_a_convolution() -> None:
    with simulate("A100-40GB", torch_version="2.6", alloc_conf="") as gpu:
        assert list(gpu.notes) == []
        assert gpu.estimated == 0
        layer = nn.Conv2d(128, 128, 3, padding=1, bias=False).cuda()
        layer(torch.randn(1, 128, 32, 32, device="cuda"))
        workspace = 128 * 32 * 32 * 4 + 128 * 128 * 9 * 4 + 512
        assert gpu.estimated == workspace
        (note,) = gpu.notes
        assert note.startswith("1.1 MiB of the peak are an estimate: cuDNN's workspace for conv2d")
        assert "test_estimates.py" in note
        torch.zeros(2**20, device="cuda")
        assert gpu.estimated == 0
        (note,) = gpu.notes
        assert note.startswith("reserved memory contains estimates, of up to 1.1 MiB at once")


def test_reserve_of_a_recurrent_layer_lives_as_long_as_its_graph() -> None:
    with simulate("A100-40GB", torch_version="2.6", alloc_conf="") as gpu:
        layer = nn.LSTM(32, 64).cuda()
        output, _ = layer(torch.randn(10, 4, 32, device="cuda"))
        reserve = 10 * 4 * 64 * 5 * 4 + 512
        torch.zeros(2**22, device="cuda")
        assert gpu.estimated == reserve
        output.sum().backward()
        del output, _
        torch.zeros(2**23, device="cuda")
        assert gpu.estimated == 0


def test_unmeasured_estimates_leave_no_note() -> None:
    memory: Any = SimpleNamespace(allocated=0, peak_allocated=0)
    estimates = Estimates(memory)
    with estimates.unmeasured():
        memory.allocated = memory.peak_allocated = 100
        estimates.taken(100, "a workspace")
        memory.allocated = 0
        estimates.freed(100)
    assert (estimates.note, estimates.in_peak) == (None, 0)
