"""A simulated device whose memory several processes share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from pytest_gpumem.sharing.devices import SharedSimulatedDevice, simulated_devices
from pytest_gpumem.simulated.simulation import SimulatedGPU

GIB = 2**30
OTHER = """
    import sys, time
    from pathlib import Path
    from pytest_gpumem.sharing.devices import SharedSimulatedDevice

    device = SharedSimulatedDevice(Path(sys.argv[1]), "t4", 15 << 30)
    assert device.take(10 << 30)
    print("holds", flush=True)
    sys.stdin.readline()
"""


def start_other(folder: Path) -> subprocess.Popen[str]:
    """Start another process, which takes 10 of 15 GiB until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", dedent(OTHER), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    return process


def test_memory_of_another_process_is_unavailable_until_it_ends(tmp_path: Path) -> None:
    (gpu,) = SimulatedGPU.machine("T4", torch_version="2.13", alloc_conf="")
    gpu.share(SharedSimulatedDevice(tmp_path, "t4", 15 * GIB))
    with start_other(tmp_path) as other, gpu.active():
        assert torch.cuda.mem_get_info()[0] == gpu.model.total_memory - 10 * GIB
        with pytest.raises(
            torch.OutOfMemoryError, match=rf"Process {other.pid} has 10\.00 GiB memory in use"
        ):
            torch.empty(6 * GIB, dtype=torch.uint8, device="cuda")
        other.kill()
        other.wait()
        assert torch.empty(6 * GIB, dtype=torch.uint8, device="cuda").nbytes == 6 * GIB


def test_segments_are_taken_from_and_returned_to_the_device(tmp_path: Path) -> None:
    shared = SharedSimulatedDevice(tmp_path, "t4", 15 * GIB)
    (gpu,) = SimulatedGPU.machine("T4", torch_version="2.13", alloc_conf="")
    gpu.share(shared)
    with gpu.active():
        x = torch.empty(100, device="cuda")
        assert sum(shared.taken().values()) == 2 << 20
        del x
        assert sum(shared.taken().values()) == 2 << 20
        torch.cuda.empty_cache()
    assert shared.taken() == {}


def test_shared_devices_are_listed(tmp_path: Path) -> None:
    assert simulated_devices(tmp_path) == []
    SharedSimulatedDevice(tmp_path, "t4", 15 * GIB)
    assert [(one.name, one.capacity) for one in simulated_devices(tmp_path)] == [("t4", 15 * GIB)]
