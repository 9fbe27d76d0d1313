"""A device renewed between tests: memory left by other tests cannot change a measurement."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_gpumem.simulated.machine.machine import SetupLog
from pytest_gpumem.simulated.simulation import SimulatedGPU

MIB = 1024 * 1024


def set_up(gpu: SimulatedGPU) -> tuple[SetupLog, nn.Linear]:
    with gpu.logging() as log:
        torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")  # a temporary, dead at once
        model = nn.Linear(1000, 1000, device="cuda")
    return log, model


def renew(gpu: SimulatedGPU, *logs: SetupLog) -> None:
    gpu.renew()
    for log in logs:
        gpu.repeat(log)


def test_blocks_of_fixtures_move_into_the_new_allocator() -> None:
    (gpu,) = SimulatedGPU.machine("T4", torch_version="2.6")
    with gpu.active():
        log, model = set_up(gpu)
        alone = (gpu.allocator.allocated, gpu.allocator.reserved)
        stray = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
        renew(gpu, log)
        assert (gpu.allocator.allocated, gpu.allocator.reserved) == alone
        assert gpu.left_behind == 5 * MIB
        assert alone == (4_000_256 + 4096, 22 * MIB)
        assert gpu.allocator.block(model.weight.data_ptr()) == 4_000_256
        del stray
        assert gpu.allocator.allocated == alone[0]
        del model
        assert gpu.allocator.allocated == 0


def test_blocks_freed_since_do_not_move() -> None:
    (gpu,) = SimulatedGPU.machine("T4")
    with gpu.active():
        log, model = set_up(gpu)
        del model.bias
        renew(gpu, log)
        assert gpu.allocator.allocated == 4_000_256
        del model
        renew(gpu, log)
        assert gpu.allocator.allocated == 0


def test_a_block_that_was_reused_does_not_move() -> None:
    (gpu,) = SimulatedGPU.machine("T4")
    with gpu.active():
        with gpu.logging() as log:
            x = torch.empty(1024, dtype=torch.uint8, device="cuda")
        address = x.data_ptr()
        del x
        stranger = torch.empty(1024, dtype=torch.uint8, device="cuda")
        assert stranger.data_ptr() == address
        renew(gpu, log)
        assert gpu.allocator.allocated == 0


def test_a_log_inside_another_keeps_its_own_events() -> None:
    (gpu,) = SimulatedGPU.machine("T4")
    with gpu.active(), gpu.logging() as outer:
        a = torch.empty(512, device="cuda")
        with gpu.logging() as inner:
            b = torch.empty(1024, device="cuda")
        c = torch.empty(2048, device="cuda")
    assert [e.size for e in outer.events if e.action == "alloc"] == [2048, 8192]
    assert [e.size for e in inner.events if e.action == "alloc"] == [4096]
    with gpu.active():
        renew(gpu, inner, outer)
        assert a.data_ptr() - b.data_ptr() == 4096
        assert c.data_ptr() - a.data_ptr() == 2048


def test_blocks_move_at_every_renewal() -> None:
    (gpu,) = SimulatedGPU.machine("T4")
    with gpu.active():
        log, model = set_up(gpu)
        for _ in range(3):
            stray = torch.empty(MIB, device="cuda")
            renew(gpu, log)
            assert gpu.allocator.allocated == sum(
                gpu.allocator.block(parameter.data_ptr()) for parameter in model.parameters()
            )
        del stray


@pytest.mark.parametrize("history", [True, False])
def test_workspaces_do_not_survive_a_renewal(history: bool) -> None:
    (gpu,) = SimulatedGPU.machine("T4", torch_version="2.6")
    gpu.allocator.history = history
    with gpu.active():
        log, model = set_up(gpu)
        model(torch.ones(1, 1000, device="cuda"))
        renew(gpu, log)
        assert gpu.workspaces.live == {}
        model(torch.ones(1, 1000, device="cuda"))
        assert list(gpu.workspaces.live.values()) == [8_519_680]
        assert gpu.allocator.block(next(iter(gpu.workspaces.live))) == 8_519_680
