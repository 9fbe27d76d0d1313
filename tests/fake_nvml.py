"""NVML, played by an object that answers and refuses as pynvml does, and machines as it plays them.

Structures are pynvml's own, and so are the errors with their codes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types
import pytest

GIB = 1024**3
MIB = 1024**2
ME = 4242
"""The PID that reads NVML, unless a test reads with its own."""


def process(pid: int, used: int | None) -> Any:
    """Return a process as pynvml lists it; ``None`` stands for NVML_VALUE_NOT_AVAILABLE."""
    struct = pynvml.c_nvmlProcessInfo_v3_t(
        pid=pid,
        usedGpuMemory=used or 0,
        gpuInstanceId=0xFFFFFFFF,
        computeInstanceId=0xFFFFFFFF,
    )
    listed = pynvml.nvmlStructToFriendlyObject(struct)
    if used is None:
        listed.usedGpuMemory = None
    return listed


def sample(pid: int, time: int, sm: int) -> Any:
    """Return one sample of a process's use of the multiprocessors."""
    return pynvml.c_nvmlProcessUtilizationSample_t(pid=pid, timeStamp=time, smUtil=sm)


@dataclass
class Gpu:
    """One device; ``errors`` has NVML's error codes by the kind of query that raises them."""

    uuid: str = "GPU-11111111-aaaa-bbbb-cccc-000000000000"
    name: str = "NVIDIA H200"
    used: int = 6 * GIB
    total: int = 140 * GIB
    reserved: int = GIB
    """Bytes that the driver reserves for itself."""
    compute: list[Any] = field(default_factory=lambda: [process(ME, 2 * GIB)])
    graphics: list[Any] = field(default_factory=list)
    mps: list[Any] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    rates: tuple[int, int] = (37, 12)
    """Per cent of the time in which kernels ran, and memory was read or written."""
    virtualization: int = pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE
    compute_mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    instances: list[Gpu | None] | None = None
    """MIG instances, with ``None`` for a free place; ``None`` where the GPU has no MIG."""
    hard_limit: int | None = None
    """The cgroup's limit in bytes; ``None`` for a driver that does not know such limits."""
    errors: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """A stand-in for pynvml that counts initialisations and raises its errors with NVML's codes."""

    NVMLError: type[Exception] = pynvml.NVMLError
    c_nvmlGetMemoryLimits_v1_t: Any = pynvml.c_nvmlGetMemoryLimits_v1_t  # noqa: N815

    def __init__(
        self, *gpus: Gpu, names: Mapping[int, str] | None = None, init_error: int | None = None
    ) -> None:
        self.gpus = gpus or (Gpu(),)
        self.names = names or {}
        self.init_error = init_error
        self.open = 0
        self.inits = 0
        self.old_driver = False
        self.driver_error: int | None = None

    def nvmlInit(self) -> None:  # noqa: N802 - pynvml's name, as all below
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open += 1
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        if self.driver_error is not None:
            raise pynvml.NVMLError(self.driver_error)
        return "570.86.15"

    def nvmlSystemGetProcessName(self, pid: int) -> str:  # noqa: N802
        if pid not in self.names:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.names[pid].encode("latin-1").decode("utf-8")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        everything = [one for gpu in self.gpus for one in (gpu, *filter(None, gpu.instances or []))]
        for gpu in everything:
            if gpu.uuid == uuid:
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Gpu) -> str:  # noqa: N802
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu, version: int | None = None) -> Any:  # noqa: N802
        self._refuse(handle, "memory")
        total, reserved = handle.total, handle.reserved
        if version is None:
            used = handle.used + reserved
            return pynvml.c_nvmlMemory_t(total=total, used=used, free=total - used)
        if self.old_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        assert version == pynvml.nvmlMemory_v2
        free = total - handle.used - reserved
        return pynvml.c_nvmlMemory_v2_t(
            version=version, total=total, used=handle.used, reserved=reserved, free=free
        )

    def nvmlDeviceGetUtilizationRates(self, handle: Gpu) -> Any:  # noqa: N802
        self._refuse(handle, "utilization")
        gpu, memory = handle.rates
        return pynvml.c_nvmlUtilization_t(gpu=gpu, memory=memory)

    def nvmlDeviceGetProcessUtilization(  # noqa: N802
        self,
        handle: Gpu,
        timeStamp: int,  # noqa: N803
    ) -> list[Any]:
        self._refuse(handle, "utilization")
        if not handle.samples:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle.samples

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Gpu) -> list[Any]:  # noqa: N802
        self._refuse(handle, "processes")
        return handle.compute

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Gpu) -> list[Any]:  # noqa: N802
        self._refuse(handle, "processes")
        return handle.graphics

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Gpu) -> list[Any]:  # noqa: N802
        self._refuse(handle, "processes")
        return handle.mps

    def nvmlDeviceGetMigMode(self, handle: Gpu) -> list[int]:  # noqa: N802
        if handle.uuid.startswith("MIG-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self._refuse(handle, "mig")
        mode = int(handle.instances is not None)
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Gpu) -> int:  # noqa: N802
        return len(handle.instances or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Gpu, index: int) -> Gpu:  # noqa: N802
        instance = (handle.instances or [])[index]
        if instance is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return instance

    def nvmlDeviceGetVirtualizationMode(self, handle: Gpu) -> int:  # noqa: N802
        self._refuse(handle, "virtualization")
        return handle.virtualization

    def nvmlDeviceGetComputeMode(self, handle: Gpu) -> int:  # noqa: N802
        self._refuse(handle, "compute_mode")
        return handle.compute_mode

    def nvmlDeviceGetMemoryLimits_v1(self, handle: Gpu, limits: Any) -> None:  # noqa: N802
        if handle.uuid.startswith("MIG-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if handle.hard_limit is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        assert limits.nameSpace.startswith("/sys/fs/cgroup")
        limits.softLimit, limits.hardLimit = 0, handle.hard_limit
        limits.currentUsed = handle.used

    def _refuse(self, handle: Gpu, question: str) -> None:
        if question in handle.errors:
            raise pynvml.NVMLError(handle.errors[question])


@dataclass(frozen=True)
class Machine:
    """A machine as NVML shows it to the process ``ME``, and the source of these answers."""

    nvml: Callable[[], FakeNvml]
    source: str
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its processes."""


def _a100(number: int = 0, **differences: Any) -> Gpu:
    plain: dict[str, Any] = {
        "uuid": f"GPU-{number}e5386b4-3e71-5837-aca5-80c5914cf07f",
        "name": "NVIDIA A100-SXM4-40GB",
        "total": 40_960 * MIB,
        "reserved": 571 * MIB,
        "used": 0,
        "compute": [],
        "rates": (0, 0),
    }
    return Gpu(**{**plain, **differences})


def _mig_a100() -> FakeNvml:
    def instance(number: int, profile: str, total: int, used: int) -> Gpu:
        return Gpu(
            uuid=f"MIG-{number}bca1d8f-40f7-5b44-a8b2-7d4d0a8ed0c1",
            name=f"NVIDIA A100-SXM4-40GB MIG {profile}",
            total=total * MIB,
            reserved=0,
            used=used * MIB,
            compute=[],
            errors={
                "utilization": pynvml.NVML_ERROR_NOT_SUPPORTED,
                "virtualization": pynvml.NVML_ERROR_NOT_SUPPORTED,
                "compute_mode": pynvml.NVML_ERROR_NOT_SUPPORTED,
            },
        )

    instances = [
        instance(3, "3g.20gb", 20_096, 11),
        None,
        instance(5, "2g.10gb", 9_984, 7),
        instance(6, "1g.5gb", 4_864, 3),
        None,
        None,
        None,
    ]
    refused = {"utilization": pynvml.NVML_ERROR_NOT_SUPPORTED}
    return FakeNvml(_a100(instances=instances, used=22 * MIB, errors=refused))


def _mps_h100() -> FakeNvml:
    gpu = Gpu(
        uuid="GPU-9d1fca33-2a4e-0bc4-6c53-40ab2c5a1c4a",
        name="NVIDIA H100 80GB HBM3",
        total=81_559 * MIB,
        reserved=551 * MIB,
        used=2_412 * MIB,
        compute=[process(3421, 30 * MIB)],
        mps=[process(ME, 1_186 * MIB), process(5123, 1_186 * MIB)],
        compute_mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        rates=(64, 21),
    )
    return FakeNvml(gpu, names={3421: "nvidia-cuda-mps-server", 5123: "python"})


def _vgpu_guest() -> FakeNvml:
    gpu = Gpu(
        uuid="GPU-4d5b3f6c-12a6-11ee-9b1f-9e1e9b2ea0c4",
        name="GRID A100D-20C",
        total=20_480 * MIB,
        reserved=1_844 * MIB,
        used=0,
        compute=[],
        virtualization=pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU,
        errors={"mig": pynvml.NVML_ERROR_NOT_SUPPORTED},
        rates=(0, 0),
    )
    return FakeNvml(gpu)


def _windows_subsystem() -> FakeNvml:
    gpu = Gpu(
        uuid="GPU-b5e386b4-3e71-5837-aca5-80c5914cf07f",
        name="NVIDIA GeForce RTX 4070 Ti SUPER",
        total=16_376 * MIB,
        reserved=0,
        used=14_360 * MIB,
        compute=[process(ME, None)],
        errors={
            "mig": pynvml.NVML_ERROR_NOT_SUPPORTED,
            "utilization": pynvml.NVML_ERROR_NOT_SUPPORTED,
            "virtualization": pynvml.NVML_ERROR_NOT_SUPPORTED,
        },
    )
    return FakeNvml(gpu)


def _exclusive(*numbers: int) -> FakeNvml:
    mode = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    return FakeNvml(*(_a100(number, compute_mode=mode) for number in numbers))


MACHINES: Mapping[str, Machine] = {
    "plain": Machine(
        lambda: FakeNvml(_a100(used=1_012 * MIB, compute=[process(28_290, 1_012 * MIB)])),
        "NVML API Reference, nvmlDeviceGetComputeMode and nvmlMemory_v2_t; virtualization mode "
        "None of a bare-metal A100: github.com/NVIDIA/k8s-test-infra/issues/640; a process of "
        "1012MiB: github.com/NVIDIA/nvidia-docker/issues/179",
    ),
    "two": Machine(
        lambda: FakeNvml(_a100(0, used=30 * GIB, compute=[process(7_941, 30 * GIB)]), _a100(1)),
        "as plain, twice; one is busy",
    ),
    "mig": Machine(
        _mig_a100,
        "NVIDIA Multi-Instance GPU User Guide, 'MIG Device Names' (profiles of an A100-SXM4-40GB) "
        "and 'Getting Started with MIG' (nvidia-smi: 11MiB / 20096MiB, 7MiB / 9984MiB, 3MiB / "
        "4864MiB; GPU-Util N/A); NVML API Reference: MIG handles have neither utilization nor a "
        "MIG mode of their own, and indices without an instance are NOT_FOUND",
    ),
    "mps": Machine(
        _mps_h100,
        "NVIDIA Multi-Process Service guide: exclusive-process mode is what it recommends, and "
        "nvidia-smi lists nvidia-cuda-mps-server as C and its clients as M+C; NVML API Reference, "
        "nvmlDeviceGetMPSComputeRunningProcesses",
    ),
    "vgpu": Machine(
        _vgpu_guest,
        "NVML API Reference, NVML_GPU_VIRTUALIZATION_MODE_VGPU (the guest's side); questions that "
        "GRID guests refuse: github.com/NVIDIA/TensorRT-LLM/issues/1861; process utilisation "
        "NOT_FOUND without samples: github.com/rust-nvml/nvml-wrapper/issues/56",
    ),
    "exclusive": Machine(
        lambda: _exclusive(0),
        "nvidia-smi 'E. Process': github.com/NVIDIA/DIGITS/issues/2005 and "
        "github.com/Project-HAMi/HAMi/issues/409; what a second process meets: "
        "github.com/huggingface/pytorch-image-models/issues/1033",
    ),
    "two exclusive": Machine(lambda: _exclusive(0, 1), "as exclusive, twice"),
    "prohibited": Machine(
        lambda: FakeNvml(_a100(compute_mode=pynvml.NVML_COMPUTEMODE_PROHIBITED)),
        "NVML API Reference, nvmlComputeMode_t: no contexts are allowed per device",
    ),
    "docker": Machine(
        lambda: FakeNvml(
            _a100(
                used=6_209 * MIB + 6_405 * MIB,
                compute=[process(4_197_941, 6_209 * MIB), process(4_195_486, 6_405 * MIB)],
            )
        ),
        "without --pid=host the PIDs are the host's: github.com/NVIDIA/nvidia-docker/issues/1483, "
        "github.com/gpuopenanalytics/pynvml/issues/36; bytes of two processes: "
        "github.com/NVIDIA/go-nvml/issues/21. PIDs here are such as no machine gives",
    ),
    "docker without processes": Machine(
        lambda: FakeNvml(_a100(used=7_325 * MIB)),
        "newer drivers list no process in a container: github.com/docker/for-linux/issues/1531, "
        "github.com/wookayin/gpustat/issues/117",
    ),
    "translated": Machine(
        lambda: FakeNvml(_a100(used=3 * GIB, compute=[process(ME, 0)])),
        "the open kernel modules translate the PID and then find no bytes for it: "
        "github.com/NVIDIA/open-gpu-kernel-modules/pull/614",
    ),
    "hami": Machine(
        lambda: FakeNvml(_a100(total=3_000 * MIB, reserved=0, used=500 * MIB)),
        "HAMi-core's README (variables, sizes like 1g and 1024m); in the container NVML shows the "
        "part and no process: github.com/Project-HAMi/HAMi/issues/1341",
        {"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m", "CUDA_DEVICE_SM_LIMIT": "50"},
    ),
    "cgpu": Machine(
        lambda: FakeNvml(_a100(name="Tesla T4", total=15_109 * MIB, reserved=0)),
        "Alibaba Cloud, 'Use Docker to install and use cGPU' (a Tesla T4 of 15 GiB, 6 for the "
        "container); here NVML shows the whole card, as beside a scheduler without cGPU's driver",
        {"ALIYUN_COM_GPU_MEM_CONTAINER": "6", "ALIYUN_COM_GPU_MEM_DEV": "15"},
    ),
    "cgroup": Machine(
        lambda: FakeNvml(_a100(hard_limit=10 * GIB)),
        "NVML API Reference, nvmlGetMemoryLimits_v1_t; NVIDIA Dynamo, 'Per-GPU Compute and Memory "
        "Limits with MPS' (nvidia-smi memory-limits)",
    ),
    "wsl": Machine(
        _windows_subsystem,
        "14360 of 16376 MiB used and [N/A] by the one process: github.com/Syllo/nvtop/issues/432; "
        "GPU-Util N/A: github.com/dask/distributed/issues/5342; NVML_VALUE_NOT_AVAILABLE under "
        "WDDM: NVML API Reference, nvmlProcessInfo_t",
    ),
}
"""Machines by name."""


def uuids(machine: str) -> Sequence[str]:
    """Return the UUIDs of a machine's MIG instances and undivided GPUs."""
    gpus = MACHINES[machine].nvml().gpus
    return [one.uuid for gpu in gpus for one in (filter(None, gpu.instances or [gpu]))]


@contextmanager
def found(
    nvml: FakeNvml, environ: Mapping[str, str] | None = None, pid: int | None = None
) -> Iterator[None]:
    """Install ``nvml`` as pynvml, with the variables ``environ`` and the PID ``pid``."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(sys.modules, "pynvml", nvml)
        patches.setattr(os, "environ", dict(environ or {}))
        if pid is not None:
            patches.setattr(os, "getpid", lambda: pid)
        yield
