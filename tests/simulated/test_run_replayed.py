"""A run's snapshot replayed with other settings, against a run with these settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_gpumem import replay, simulate
from pytest_gpumem.simulating import SimulatedRun


def training(width: int = 1500, steps: int = 3) -> None:
    with torch.device("cuda"):
        wide = nn.Linear(width, 3 * width), nn.LayerNorm(3 * width)
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), *wide)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        x = torch.randn(200 + 150 * step, width, device="cuda")
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(gpu: str = "A100-40GB", alloc_conf: str = "", width: int = 1500) -> SimulatedRun:
    with simulate(gpu, torch_version="2.6", alloc_conf=alloc_conf) as done:
        training(width)
    return done


@pytest.mark.parametrize(
    "conf",
    [
        "expandable_segments:True",
        "max_split_size_mb:30",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.5",
    ],
)
def test_a_replay_with_other_settings_equals_a_run_with_them(conf: str) -> None:
    default, other = run(), run(alloc_conf=conf)

    result = replay(default.snapshot(), conf)

    assert result.exact
    assert (result.peak_allocated, result.peak_reserved) == (
        other.peak_allocated,
        other.peak_reserved,
    )
    assert result.devices[0].recorded.peak_reserved == default.peak_reserved


def test_a_smaller_gpu_fails_where_a_run_on_it_does() -> None:
    # Of one compute capability, so that both have the same cuBLAS workspaces.
    recorded = run("L40S", width=16_000)
    with simulate("RTX-4060", torch_version="2.6") as small:
        with pytest.raises(torch.OutOfMemoryError):
            training(16_000)
        failed = next(event for event in small.trace if event.action == "oom")

    shortage = replay(recorded.snapshot(), gpu="RTX-4060").out_of_memory

    assert shortage is not None
    # The event's address is the device's free memory, its size was rounded.
    assert shortage.free == failed.addr
    assert -(-shortage.requested // 512) * 512 == failed.size
    event = recorded.trace[shortage.event]
    assert (event.action, event.size) == ("alloc", shortage.requested)
    assert shortage.line.startswith(f"{__file__}:")


def test_every_gpu_of_a_machine_is_replayed() -> None:
    with simulate("A100-80GB*2") as gpu:
        first, second = nn.Linear(900, 900).cuda(), nn.Linear(900, 700).to("cuda:1")
        second(first(torch.randn(50, 900, device="cuda")).to("cuda:1")).sum().backward()

    result = replay(gpu.snapshot())

    assert result.exact
    assert [device.recorded.peak_reserved for device in result.devices] == [
        device.peak_reserved for device in gpu.devices
    ]
    assert result.total == sum(
        event.action == "alloc" for device in gpu.devices for event in device.trace
    )
