"""The mode of a device, on machines of the fake NVML and by a container's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_gpumem.measurement import device_mode
from pytest_gpumem.measurement.device_mode import container_limit
from pytest_gpumem.measurement.nvml import NvmlReading, read_device, read_visible
from tests.fake_nvml import GIB, MACHINES, ME, FakeNvml, Gpu, Machine, found


def read(nvml: FakeNvml, environ: Mapping[str, str] | None = None) -> NvmlReading:
    with found(nvml, environ, ME):
        reading = read_device()
    assert isinstance(reading, NvmlReading), reading
    return reading


def of(machine: str) -> NvmlReading:
    return read(MACHINES[machine].nvml(), environ=MACHINES[machine].environ)


@pytest.mark.parametrize(
    ("machine", "partition", "words"),
    [
        ("plain", "", ()),
        ("mig", "MIG-3g.20gb", ("MIG 3g.20gb",)),
        ("mps", "MPS", ("MPS", "exclusive-process mode")),
        ("vgpu", "vGPU", ("vGPU",)),
        ("exclusive", "exclusive", ("exclusive-process mode",)),
        ("prohibited", "", ("compute mode prohibited",)),
        ("docker", "", ()),
        ("hami", "HAMi", ("HAMi leaves 2.93 GiB",)),
        ("cgpu", "cGPU", ("cGPU leaves 5.90 GiB",)),
        ("cgroup", "cgroup", ("cgroup leaves 10.00 GiB",)),
        ("wsl", "", ()),
    ],
)
def test_partitions_of_real_machines(machine: str, partition: str, words: tuple[str, ...]) -> None:
    mode = of(machine).mode
    assert (mode.partition, mode.words) == (partition, words)


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        ("mps", None),
        ("docker", "is not among those NVML lists"),
        ("docker without processes", "is not among those NVML lists"),
        ("translated", "does not say how much"),
        ("hami", "is not among those NVML lists"),
        ("wsl", "does not say how much"),
    ],
)
def test_the_memory_of_the_own_process_or_why_it_is_unknown(machine: str, why: str | None) -> None:
    reading = of(machine)
    if why is None:
        assert (reading.process_used, reading.unattributed) == (1186 * 2**20, None)
    else:
        assert reading.process_used is None
        assert why in str(reading.unattributed)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_machine_is_readable_and_names_its_source(machine: Machine) -> None:
    with found(machine.nvml(), machine.environ):
        assert isinstance(read_visible(), list)
    assert len(machine.source) > 5


@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        ({"CUDA_DEVICE_MEMORY_LIMIT": "1g"}, ("HAMi", GIB)),
        ({"CUDA_DEVICE_MEMORY_LIMIT_1": "1g"}, None),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "0", "CUDA_DEVICE_MEMORY_LIMIT": "5"}, ("HAMi", 5)),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "1048576k"}, ("HAMi", GIB)),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "much"}, None),
        ({"CUDA_DEVICE_SM_LIMIT": "30"}, ("HAMi", None)),
        ({"ALIYUN_COM_GPU_MEM_CONTAINER": "1", "ALIYUN_COM_GPU_MEM_DEV": "4"}, ("cGPU", 4 * GIB)),
        ({"ALIYUN_COM_GPU_MEM_CONTAINER": "16"}, ("cGPU", 16 * GIB)),
        ({"ALIYUN_COM_GPU_MEM_CONTAINER": "2"}, ("cGPU", 2 * GIB)),
        ({"ALIYUN_COM_GPU_MEM_DEV": "4"}, None),
        ({"ALIYUN_COM_GPU_MEM_CONTAINER": "1", "CGPU_DISABLE": "true"}, None),
    ],
)
def test_the_memory_limit_of_a_container(
    environ: dict[str, str], limit: tuple[str, int | None] | None
) -> None:
    assert container_limit(environ, 0, 16 * GIB) == limit


def test_the_smaller_of_two_limits_counts() -> None:
    gpu = Gpu(hard_limit=10 * GIB)
    environ = {"CUDA_DEVICE_MEMORY_LIMIT": "20g"}
    assert read(FakeNvml(gpu), environ=environ).mode.words == ("cgroup leaves 10.00 GiB",)
    assert read(FakeNvml(gpu), environ={"CUDA_DEVICE_MEMORY_LIMIT": "2g"}).mode.limit == 2 * GIB
    assert read(FakeNvml(Gpu(hard_limit=2**64 - 1))).mode.limit is None


def test_a_daemon_of_mps_is_found_by_its_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_mode, "MPS_DIRECTORY", str(tmp_path))
    assert not device_mode.mps_daemon_runs({})
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    assert device_mode.mps_daemon_runs({})
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("4197941\n")
    assert not device_mode.mps_daemon_runs({})
