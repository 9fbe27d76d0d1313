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
from typing import Any, TypeVar

from pytest_gpumem.measurement.device_mode import NvmlMode, container_limit, mps_daemon_runs
from pytest_gpumem.measurement.nvml_library import (
    NoDeviceError,
    Nvml,
    NvmlSession,
    load_nvml,
    reason_of,
    visible_devices,
)
from pytest_gpumem.values.plain import Plain

T = TypeVar("T")

COMPUTE_MODE_PROHIBITED, COMPUTE_MODE_EXCLUSIVE_PROCESS = 2, 3  # nvml.h, nvmlComputeMode_t
VIRTUALIZATION_MODE_VGPU = 2  # nvml.h, nvmlGpuVirtualizationMode_t
NO_MEMORY_LIMIT = 2**64 - 1  # nvml.h, NVML_DEVICE_MEMORY_LIMIT_MAX
MPS_SERVER = "nvidia-cuda-mps-server"

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
    """The bytes of all contexts, allocators and processes, without the driver's own reserve."""
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


def read_device(
    device: int | str = 0,
    nvml: Nvml | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    pid: int | None = None,
) -> NvmlReading | NvmlAbsent:
    """Read one device once; NVML is initialised and shut down inside.

    ``device`` is a UUID (``GPU-...``, ``MIG-...``, the bare digits torch prints, or the
    beginning of one) or CUDA's index, which is mapped through ``CUDA_VISIBLE_DEVICES``. CUDA and
    NVML may count differently, so prefer the UUID where torch provides it. To see this process, and
    to see MPS, read after the CUDA context exists.
    """
    known = os.environ if environ is None else environ
    asker = os.getpid() if pid is None else pid
    return _reading(nvml, lambda session: session.read(device, asker), known)


def _reading(
    nvml: Nvml | None, read: Callable[[_Reader], T], environ: Mapping[str, str]
) -> T | NvmlAbsent:
    library = nvml if nvml is not None else load_nvml()
    if library is None:
        return NvmlAbsent(NOT_INSTALLED)
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return NvmlAbsent(reason_of(error))
    session = _Reader(library, environ)
    try:
        return read(session)
    except (NoDeviceError, library.NVMLError) as error:
        return NvmlAbsent(reason_of(error))
    finally:
        session.ask(library.nvmlShutdown)


def read_all(nvml: Nvml | None = None) -> list[NvmlReading] | NvmlAbsent:
    """Read every device of the host once, and every instance of those that MIG divides.

    ``CUDA_VISIBLE_DEVICES`` has no effect on it.
    """
    return _reading(nvml, lambda session: session.read_all(os.getpid()), os.environ)


def read_visible(
    nvml: Nvml | None = None, *, environ: Mapping[str, str] | None = None
) -> list[NvmlReading] | NvmlAbsent:
    """Read every device that CUDA shows a process of this environment, in CUDA's order.

    Of a GPU that MIG divides, every instance is read, though CUDA shows a process only one.
    """
    known = os.environ if environ is None else environ
    return _reading(nvml, lambda session: session.read_visible(os.getpid()), known)


class NvmlMemory:
    """A repeated reading of one device's memory; NVML stays initialised until it is closed.

    Raises :class:`LookupError`, with one clause, where NVML provides none.
    """

    def __init__(self, uuid: str, nvml: Nvml | None = None) -> None:
        self._uuid = uuid
        self._given = nvml
        self._session: _Reader | None = None
        self._handle: Any = None
        self._process = 0

    def read(self) -> tuple[int, dict[int, int | None]]:
        """Return the bytes used by all processes, and by each process that NVML lists."""
        session = self._opened()
        try:
            used = int(session.memory(self._handle).used)
        except session.nvml.NVMLError as error:
            raise LookupError(reason_of(error)) from error
        return used, session.used_by_process(self._handle) or {}

    def _opened(self) -> _Reader:
        if self._session is None or self._process != os.getpid():
            library = self._given if self._given is not None else load_nvml()
            if library is None:
                raise LookupError(NOT_INSTALLED)
            session = _Reader(library, {})
            try:
                library.nvmlInit()
                self._handle = session.by_uuid(self._uuid)
            except (library.NVMLError, NoDeviceError) as error:
                raise LookupError(reason_of(error)) from error
            self._session, self._process = session, os.getpid()
        return self._session


class _Reader(NvmlSession):
    def read(self, device: int | str, pid: int) -> NvmlReading:
        return self._read(self.instance(self.find(device)), pid)

    def read_all(self, pid: int) -> list[NvmlReading]:
        return self._read_with_instances(self.handles(), pid)

    def read_visible(self, pid: int) -> list[NvmlReading]:
        handles = list(self.handles())
        entries = visible_devices(self.environ.get("CUDA_VISIBLE_DEVICES"), len(handles))
        chosen = [entry for entry in entries if isinstance(entry, int)]
        if len(chosen) not in (0, len(handles)):
            self.require_one_order(handles)
        found = [handles[one] if isinstance(one, int) else self.by_uuid(one) for one in entries]
        return self._read_with_instances(found, pid)

    def _read_with_instances(self, handles: Iterable[Any], pid: int) -> list[NvmlReading]:
        found = []
        for handle in handles:
            instances = list(self.instances(handle))
            found += [self._read(one, pid) for one in instances or [handle]]
        return found

    def _read(self, handle: Any, pid: int) -> NvmlReading:
        nvml = self.nvml
        memory = self.memory(handle)
        rates = self.ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        processes = self._processes(handle)
        own = None if processes is None else processes.get(pid)
        return NvmlReading(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=nvml.nvmlDeviceGetName(handle),
            driver=self.ask(nvml.nvmlSystemGetDriverVersion),
            total=int(memory.total),
            used=int(memory.used),
            free=int(memory.free),
            process_used=own.used if own else None,
            unattributed=_unattributed(processes, pid),
            others=None if processes is None else _others(processes, pid),
            alone=_alone(processes, pid),
            mode=self._mode(handle, processes or {}, int(memory.total)),
            gpu_percent=None if rates is None else int(rates.gpu),
            memory_percent=None if rates is None else int(rates.memory),
            process_gpu_percent=self._percents(handle).get(pid),
        )

    def _mode(self, handle: Any, processes: Mapping[int, NvmlProcess], total: int) -> NvmlMode:
        nvml = self.nvml
        name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        virtualization = self.ask(nvml.nvmlDeviceGetVirtualizationMode, handle)
        compute_mode = self.ask(nvml.nvmlDeviceGetComputeMode, handle)
        limited_by, limit = self._limit(handle, uuid, total) or (None, None)
        return NvmlMode(
            mig_profile=_mig_profile(name) if uuid.startswith("MIG-") else None,
            vgpu=virtualization == VIRTUALIZATION_MODE_VGPU,
            mps=bool(self.ask(nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle))
            or mps_daemon_runs(self.environ)
            or any(process.name == MPS_SERVER for process in processes.values()),
            exclusive_process=compute_mode == COMPUTE_MODE_EXCLUSIVE_PROCESS,
            prohibited=compute_mode == COMPUTE_MODE_PROHIBITED,
            limited_by=limited_by,
            limit=limit,
        )

    def _limit(self, handle: Any, uuid: str, total: int) -> tuple[str, int | None] | None:
        """Return the software that limits this container's part of a device, and its bytes."""
        uuids = [self.ask(self.nvml.nvmlDeviceGetUUID, one) for one in self.handles()]
        index = uuids.index(uuid) if uuid in uuids else 0
        by_cgroup = self._cgroup_limit(handle)
        found = container_limit(self.environ, index, total)
        if by_cgroup is None or (found and (found[1] or total) <= by_cgroup):
            return found
        return "cgroup", by_cgroup

    def _cgroup_limit(self, handle: Any) -> int | None:
        # In newer drivers and in nvidia-ml-py since 13; for Linux, and not for MIG handles.
        question = getattr(self.nvml, "nvmlDeviceGetMemoryLimits_v1", None)
        if question is None:
            return None
        limits = self.nvml.c_nvmlGetMemoryLimits_v1_t()  # type: ignore[attr-defined]  # as above
        limits.nameSpace = os.fsencode(own_cgroup())
        if self.ask(_answered, question, handle, limits) is None:
            return None
        hard = int(limits.hardLimit)
        return hard if 0 < hard < NO_MEMORY_LIMIT else None

    def _processes(self, handle: Any) -> dict[int, NvmlProcess] | None:
        used = self.used_by_process(handle)
        if used is None:
            return None
        busy = self._percents(handle)
        return {
            pid: NvmlProcess(pid, self.process_name(pid), used[pid], busy.get(pid))
            for pid in sorted(used)
        }

    def _percents(self, handle: Any) -> dict[int, int]:
        """Return each process's share of kernel time; of several samples the latest counts."""
        # NVML raises "not found" where it has no sample, which is the rule for a short test, and
        # has been seen to return numbers above 100 (github.com/Syllo/nvtop/issues/110).
        samples = self.ask(self.nvml.nvmlDeviceGetProcessUtilization, handle, 0) or ()
        latest = sorted(samples, key=lambda sample: int(sample.timeStamp))
        return {int(one.pid): int(one.smUtil) for one in latest if one.smUtil <= 100}


def own_cgroup() -> str:
    """Return the folder of this process's cgroup; the root where it is not known."""
    root = "/sys/fs/cgroup"
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return root
    found = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    return root + found[0].rstrip("/") if found else root


def _answered(question: Callable[..., None], *args: Any) -> bool:
    """Call a function of NVML that writes its result into an argument."""
    question(*args)
    return True


def _unattributed(processes: Mapping[int, NvmlProcess] | None, pid: int) -> str | None:
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


def _others(processes: Mapping[int, NvmlProcess], pid: int) -> tuple[NvmlProcess, ...]:
    return tuple(process for process in processes.values() if process.pid != pid)


def _alone(processes: Mapping[int, NvmlProcess] | None, pid: int) -> bool | None:
    if processes is None:
        return None
    if pid in processes:
        return len(processes) == 1
    # One unrecognised process may be this one under its PID on the host; two cannot both be.
    return False if len(processes) > 1 else None


def _mig_profile(name: str) -> str:
    profile = re.search(r"MIG\s+(\S+)", name)
    return profile[1] if profile else ""
