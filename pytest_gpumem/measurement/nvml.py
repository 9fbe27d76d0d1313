"""NVML's readings of a device: memory used by all processes, not only by the caching allocator.

These numbers never mix with the allocator's: they hold contexts, library code and other
processes. A value that NVML does not provide is ``None``; if it provides none, the result is one
:class:`NvmlAbsent` with the reason, never an exception.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from pytest_gpumem.measurement.device_mode import NvmlMode, container_limit, mps_daemon_runs
from pytest_gpumem.measurement.nvml_library import (
    NoDeviceError,
    NvmlSession,
    load_nvml,
    reason_of,
    visible_devices,
)
from pytest_gpumem.values.serialization import Plain

T = TypeVar("T")

COMPUTE_MODE_PROHIBITED, COMPUTE_MODE_EXCLUSIVE_PROCESS = 2, 3  # nvml.h, nvmlComputeMode_t
VIRTUALIZATION_MODE_VGPU = 2  # nvml.h, nvmlGpuVirtualizationMode_t
NO_MEMORY_LIMIT = 2**64 - 1  # nvml.h, NVML_DEVICE_MEMORY_LIMIT_MAX
MPS_SERVER = "nvidia-cuda-mps-server"

SAMPLE_PERIOD = 1 / 6
"""Seconds of the shortest sample of a GPU's use (nvml.h, nvmlUtilization_t)."""

NOT_INSTALLED = "the package nvidia-ml-py is not installed"


@dataclass(frozen=True)
class NvmlAbsent:
    """NVML cannot be read; ``reason`` is one clause on the cause."""

    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"absent": self.reason}


@dataclass(frozen=True)
class NvmlProcess(Plain):
    """A process on the device; ``used`` in bytes, ``None`` where NVML does not report it."""

    pid: int
    """The PID as the driver sees it: in a container it may be the host's."""
    name: str | None
    used: int | None
    gpu_percent: int | None = None
    """The share of its last sample period in which its kernels ran; ``None`` without a sample."""


@dataclass(frozen=True)
class NvmlReading(Plain):
    """A reading of one device (or MIG instance) by NVML; memory in bytes."""

    uuid: str
    name: str
    driver: str | None
    total: int
    used: int
    """The bytes that all processes use, with their contexts, without the driver's reserve."""
    free: int
    process_used: int | None
    """The bytes of this process; ``None`` where :attr:`unattributed` gives the reason."""
    unattributed: str | None
    others: tuple[NvmlProcess, ...] | None
    """The other processes; ``None`` where NVML lists none at all. When this process is not
    recognised, one of them may be this process."""
    alone: bool | None
    """Whether no other process is on the device; ``None`` where that cannot be known."""
    mode: NvmlMode
    gpu_percent: int | None = None
    """The share of the last sample period in which a kernel ran."""
    memory_percent: int | None = None
    """The share of the last sample period in which device memory was read or written."""
    process_gpu_percent: int | None = None


def read_device(device: int | str = 0) -> NvmlReading | NvmlAbsent:
    """Read one device once; NVML is initialised and shut down inside.

    ``device`` is a UUID (``GPU-...``, ``MIG-...``, the bare digits torch prints, or the
    beginning of one) or CUDA's index, which is mapped through ``CUDA_VISIBLE_DEVICES``. CUDA and
    NVML may count differently, so prefer the UUID where torch provides it. To see this process, and
    to see MPS, read after the CUDA context exists.
    """
    return RepeatedReading(device).read()


class RepeatedReading:
    """Repeated readings of one device, which query constant values only once.

    ``device`` is that of :func:`read_device`. Name, driver and mode are those of the first reading.
    The shares of time are queried once per sample period: the driver takes 1.4 ms for those of
    the processes, and 0.3 ms for all other values (H100, driver 580).
    """

    def __init__(self, device: int | str) -> None:
        self._device = device
        self._before: NvmlReading | None = None
        self._busy: Mapping[int, int] = {}
        self._asked = 0.0

    def read(self) -> NvmlReading | NvmlAbsent:
        """Read the device once."""
        return _reading(self._read)

    def _read(self, session: _Reader) -> NvmlReading:
        handle = session.instance(session.find(self._device))
        now = monotonic()
        if self._before is None or now - self._asked >= SAMPLE_PERIOD:
            self._busy, self._asked = session.percents(handle), now
        self._before = session.read_handle(handle, self._busy, self._before)
        return self._before


def _reading(read: Callable[[_Reader], T]) -> T | NvmlAbsent:
    library = load_nvml()
    if library is None:
        return NvmlAbsent(NOT_INSTALLED)
    session = _Reader(library)
    try:
        library.nvmlInit()
        try:
            return read(session)
        finally:
            session.query(library.nvmlShutdown)
    except (NoDeviceError, library.NVMLError) as error:
        return NvmlAbsent(reason_of(error))


def read_all() -> list[NvmlReading] | NvmlAbsent:
    """Read every device of the host once, and every MIG instance.

    ``CUDA_VISIBLE_DEVICES`` has no effect on it.
    """
    return _reading(lambda session: session.read_each(session.handles()))


def read_visible() -> list[NvmlReading] | NvmlAbsent:
    """Read every device that CUDA shows this process, in CUDA's order.

    Of a GPU that MIG divides, every instance is read, though CUDA shows a process only one.
    """
    return _reading(lambda session: session.read_each(session.visible()))


def stay_open() -> None:
    """Keep NVML initialised in this process: it counts initialisations, and later ones are quick.

    Source: nvml.h, nvmlInit_v2.
    """
    if (library := load_nvml()) is not None:
        library.nvmlInit()


class _Reader(NvmlSession):
    """A session that makes readings."""

    def visible(self) -> list[Any]:
        """Return the handles of the devices that CUDA shows."""
        handles = list(self.handles())
        entries = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), len(handles))
        chosen = [entry for entry in entries if isinstance(entry, int)]
        if len(chosen) not in (0, len(handles)):
            self.require_one_order(handles)
        return [handles[one] if isinstance(one, int) else self.by_uuid(one) for one in entries]

    def read_each(self, handles: Iterable[Any]) -> list[NvmlReading]:
        """Read devices, each instance of those that MIG divides."""
        every = [one for each in handles for one in list(self.instances(each)) or [each]]
        return [self.read_handle(one, self.percents(one)) for one in every]

    def read_handle(
        self, handle: Any, busy: Mapping[int, int], before: NvmlReading | None = None
    ) -> NvmlReading:
        """Read a device whose processes are ``busy``; ``before`` is an earlier reading of it."""
        nvml = self.nvml
        memory = self.memory(handle)
        rates = self.query(nvml.nvmlDeviceGetUtilizationRates, handle)
        listed = self._processes(handle, busy)
        processes = listed or {}
        pid = os.getpid()
        own = processes.get(pid)
        # One unrecognised process may be this one, listed by its PID on the host.
        alone = len(processes) == 1 if own else False if len(processes) > 1 else None
        return NvmlReading(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=before.name if before else nvml.nvmlDeviceGetName(handle),
            driver=before.driver if before else self.query(nvml.nvmlSystemGetDriverVersion),
            total=int(memory.total),
            used=int(memory.used),
            free=int(memory.free),
            process_used=own.used if own else None,
            unattributed=_unattributed(listed, pid),
            others=None
            if listed is None
            else tuple(each for each in processes.values() if each.pid != pid),
            alone=alone,
            mode=before.mode if before else self._mode(handle, processes, int(memory.total)),
            gpu_percent=None if rates is None else int(rates.gpu),
            memory_percent=None if rates is None else int(rates.memory),
            process_gpu_percent=busy.get(pid),
        )

    def _mode(self, handle: Any, processes: Mapping[int, NvmlProcess], total: int) -> NvmlMode:
        nvml = self.nvml
        name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        virtualization = self.query(nvml.nvmlDeviceGetVirtualizationMode, handle)
        compute_mode = self.query(nvml.nvmlDeviceGetComputeMode, handle)
        limited_by, limit = self._limit(handle, uuid, total) or (None, None)
        profile = re.search(r"MIG\s+(\S+)", name)
        return NvmlMode(
            mig_profile=(profile[1] if profile else "") if uuid.startswith("MIG-") else None,
            vgpu=virtualization == VIRTUALIZATION_MODE_VGPU,
            mps=bool(self.query(nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle))
            or mps_daemon_runs(os.environ)
            or any(process.name == MPS_SERVER for process in processes.values()),
            exclusive_process=compute_mode == COMPUTE_MODE_EXCLUSIVE_PROCESS,
            prohibited=compute_mode == COMPUTE_MODE_PROHIBITED,
            limited_by=limited_by,
            limit=limit,
        )

    def _limit(self, handle: Any, uuid: str, total: int) -> tuple[str, int | None] | None:
        """Return the software that limits this container's part of a device, and its bytes."""
        uuids = [self.query(self.nvml.nvmlDeviceGetUUID, one) for one in self.handles()]
        index = uuids.index(uuid) if uuid in uuids else 0
        by_cgroup = 0
        # In newer drivers and in nvidia-ml-py since 13; for Linux, and not for MIG handles.
        if question := getattr(self.nvml, "nvmlDeviceGetMemoryLimits_v1", None):
            limits = self.nvml.c_nvmlGetMemoryLimits_v1_t()
            limits.nameSpace = os.fsencode(own_cgroup())
            self.query(question, handle, limits)
            by_cgroup = int(limits.hardLimit)  # 0 without an answer
        found = container_limit(os.environ, index, total)
        known = 0 < by_cgroup < NO_MEMORY_LIMIT
        if not known or (found and (found[1] or total) <= by_cgroup):
            return found
        return "cgroup", by_cgroup

    def _processes(self, handle: Any, busy: Mapping[int, int]) -> dict[int, NvmlProcess] | None:
        used = self.used_by_process(handle)
        if used is None:
            return None
        return {
            pid: NvmlProcess(pid, self.process_name(pid), used[pid], busy.get(pid))
            for pid in sorted(used)
        }

    def percents(self, handle: Any) -> dict[int, int]:
        """Return each process's share of kernel time; of several samples the latest counts."""
        # NVML raises "not found" where it has no sample, as for most short tests. It sometimes
        # returns numbers above 100 (github.com/Syllo/nvtop/issues/110).
        samples = self.query(self.nvml.nvmlDeviceGetProcessUtilization, handle, 0) or ()
        latest = sorted(samples, key=lambda sample: int(sample.timeStamp))
        return {int(one.pid): int(one.smUtil) for one in latest if one.smUtil <= 100}


def _unattributed(processes: Mapping[int, NvmlProcess] | None, pid: int) -> str | None:
    """Return why the bytes of the process ``pid`` are not known, ``None`` where they are."""
    if processes is None:
        return "NVML does not list the device's processes"
    if pid not in processes:
        return (
            f"this process (PID {pid}) is not among those NVML lists; "
            "in a container their PIDs may be the host's"
        )
    if processes[pid].used is None:
        return f"NVML does not say how much this process (PID {pid}) uses"
    return None


def own_cgroup() -> str:
    """Return the folder of this process's cgroup; the root where it is not known."""
    root = "/sys/fs/cgroup"
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return root
    found = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    return root + found[0].rstrip("/") if found else root
