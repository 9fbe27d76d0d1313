"""Lower bound of the time that computing takes, from operation counts and the CPU's speed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.machine.values import work


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``counted(step)``: the floating-point operations of ``step()``."""
    monkeypatch.setattr(work, "speed", lambda dtype: 1.0)

    def count(step: Any) -> float:
        with simulate("A100-40GB") as gpu:
            step()
            seconds: float = gpu._gpu.simulation.values.work.seconds
            return seconds

    return count


@pytest.mark.parametrize(("groups", "per_output"), [(1, 16), (4, 4), (16, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_gradient_of_a_convolution_counts_as_the_convolution(
    counted: Any, groups: int, per_output: int, transposed: bool
) -> None:
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d

    def step(*, backward: bool) -> None:
        layer = kind(16, 16, 3, groups=groups, padding=1, bias=False).cuda()
        x = torch.randn(2, 16, 32, device="cuda", requires_grad=True)
        y = layer(x)
        if backward:
            y.sum().backward()

    once = 2 * (2 * 16 * 32) * (per_output * 3)
    assert counted(lambda: step(backward=False)) == once
    assert counted(lambda: step(backward=True)) == 3 * once


def test_the_speed_is_one_threads_cpu_time_scaled_to_all_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    multiply = torch.mm

    def waiting(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        time.sleep(0.2)  # as on a processor that is shared
        return multiply(*args)

    monkeypatch.setattr(torch, "mm", waiting)
    threads = torch.get_num_threads()
    started = time.thread_time()
    speed = work.speed.__wrapped__(torch.float32)
    if time.get_clock_info("thread_time").resolution > 1e-4:
        pytest.skip("the clock of a thread is too coarse here")
    spent = time.thread_time() - started
    assert set(seen) == {1}
    assert torch.get_num_threads() == threads
    # Three products in the thread's CPU time, not in 0.6 s of wall time.
    assert speed >= threads * 2 * 512**3 / max(spent, 1e-9)
    assert speed > threads * 2 * 512**3 / 0.2


def test_float8_has_the_speed_of_the_dtype_that_computes_it() -> None:
    assert work.speed(torch.float8_e4m3fn) == work.speed(torch.float32)
