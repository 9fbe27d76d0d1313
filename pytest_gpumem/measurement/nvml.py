"""What NVML says of a device: memory used by everyone, not only by the caching allocator.

These numbers never mix with the allocator's: they hold contexts, library code and other
processes. Whatever NVML does not tell is ``None``; where it tells nothing, the answer is one
:class:`NvmlAbsent` with the reason, never an exception.
"""

# ruff: noqa: D102, N802, N803 - the protocol repeats pynvml's own names
from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")

# nvml.h, nvmlReturn_t: what users meet, in their words.
REASONS: Mapping[int, str] = {
    4: "NVML refuses access to the device (insufficient permissions)",
    9: "the NVIDIA driver is not loaded",
    12: "NVML's shared library was not found, so no NVIDIA driver is installed",
    15: "the GPU has fallen off the bus",
    18: "the NVIDIA driver and NVML's library are of different versions (reboot after an update)",
}

COMPUTE_MODE_EXCLUSIVE_PROCESS = 3  # nvml.h, nvmlComputeMode_t
VIRTUALIZATION_MODE_VGPU = 2  # nvml.h, nvmlGpuVirtualizationMode_t
MIG_ENABLED = 1  # nvml.h, NVML_DEVICE_MIG_ENABLE
MEMORY_INFO_V2 = 0x02000028  # nvml.h, nvmlMemory_v2: `used` without what the driver reserves
MPS_SERVER = "nvidia-cuda-mps-server"


class Nvml(Protocol):
    """The part of the ``pynvml`` module (package nvidia-ml-py) that is used here."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlSystemGetProcessName(self, pid: int) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetProcessUtilization(self, handle: Any, timeStamp: int) -> Sequence[Any]: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...
    def nvmlDeviceGetVirtualizationMode(self, handle: Any) -> int: ...
    def nvmlDeviceGetComputeMode(self, handle: Any) -> int: ...


@dataclass(frozen=True)
class NvmlAbsent:
    """NVML cannot be read; ``reason`` is one clause that says why."""

    reason: str

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"absent": self.reason}


@dataclass(frozen=True)
class NvmlProcess:
    """One process on the device; ``used`` in bytes, ``None`` where NVML does not say."""

    pid: int
    """As the driver counts: in a container it may be the host's."""
    name: str | None
    used: int | None


@dataclass(frozen=True)
class NvmlMode:
    """How the device is divided and who may use it."""

    mig_profile: str | None = None
    """``1g.5gb``; empty for a MIG instance whose name does not tell; ``None`` for a whole GPU."""
    vgpu: bool = False
    mps: bool = False
    exclusive_process: bool = False

    @property
    def partition(self) -> str:
        """``MIG-1g.5gb``, ``vGPU``, ``MPS`` or a combination; empty for a whole device."""
        mig = None if self.mig_profile is None else f"MIG-{self.mig_profile}".rstrip("-")
        return "-".join(part for part in (mig, self.vgpu and "vGPU", self.mps and "MPS") if part)


@dataclass(frozen=True)
class NvmlReading:
    """One moment of one device (or MIG instance) as NVML sees it; memory in bytes."""

    uuid: str
    name: str
    driver: str | None
    total: int
    used: int
    """By everyone: contexts, allocators, other processes; without the driver's own reserve."""
    free: int
    process_used: int | None
    """By this process; ``None`` where :attr:`unattributed` says why."""
    unattributed: str | None
    others: tuple[NvmlProcess, ...] | None
    """The other processes; ``None`` where NVML lists none at all. When this process is not
    recognised, one of them may be this process."""
    alone: bool | None
    """Whether no other process is on the device; ``None`` where that cannot be known."""
    mode: NvmlMode
    gpu_percent: int | None = None
    """Share of the last sample period in which a kernel ran."""
    memory_percent: int | None = None
    """Share of the last sample period in which device memory was read or written."""
    process_gpu_percent: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: builtin types only."""
        others = None if self.others is None else [asdict(other) for other in self.others]
        return {**asdict(self), "others": others}


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
    NVML may count differently, so prefer the UUID where torch tells it. To see this process, and
    to see MPS, read after the CUDA context exists.
    """
    known = os.environ if environ is None else environ
    asker = os.getpid() if pid is None else pid
    return _reading(nvml, lambda session: session.read(device, asker), known)


def _reading(
    nvml: Nvml | None, read: Callable[[_Session], T], environ: Mapping[str, str]
) -> T | NvmlAbsent:
    library = nvml if nvml is not None else _load()
    if isinstance(library, NvmlAbsent):
        return library
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return NvmlAbsent(_reason(error))
    session = _Session(library, environ)
    try:
        return read(session)
    except _NoDeviceError as error:
        return NvmlAbsent(str(error))
    except library.NVMLError as error:
        return NvmlAbsent(_reason(error))
    finally:
        session.ask(library.nvmlShutdown)


def read_all(nvml: Nvml | None = None) -> list[NvmlReading] | NvmlAbsent:
    """Read every device of the host once, and every instance of those that MIG divides.

    Whatever ``CUDA_VISIBLE_DEVICES`` says.
    """
    return _reading(nvml, lambda session: session.read_all(os.getpid()), {})


def _load() -> Nvml | NvmlAbsent:
    try:
        with warnings.catch_warnings():
            # The superseded package `pynvml` warns on import; it answers all the same.
            warnings.simplefilter("ignore")
            return cast(Nvml, import_module("pynvml"))
    except ImportError:
        return NvmlAbsent("the package nvidia-ml-py is not installed")


def _reason(error: Exception) -> str:
    code = getattr(error, "value", None)
    return REASONS.get(cast(int, code), f"NVML says: {error}")


class _NoDeviceError(Exception):
    """The device asked for cannot be found; the message is the reason."""


@dataclass(frozen=True)
class _Session:
    nvml: Nvml
    environ: Mapping[str, str]

    def ask(self, call: Callable[..., T], *args: Any) -> T | None:
        """The answer, or ``None`` where this device, driver or permission does not give one."""
        try:
            return call(*args)
        except (self.nvml.NVMLError, UnicodeDecodeError):
            return None

    def read(self, device: int | str, pid: int) -> NvmlReading:
        return self._read(self._instance(self._find(device)), pid)

    def read_all(self, pid: int) -> list[NvmlReading]:
        found = []
        for handle in self._handles():
            instances = list(self._instances(handle))
            found += [self._read(one, pid) for one in instances or [handle]]
        return found

    def _read(self, handle: Any, pid: int) -> NvmlReading:
        nvml = self.nvml
        memory = self._memory(handle)
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
            mode=self._mode(handle, processes or {}),
            gpu_percent=None if rates is None else int(rates.gpu),
            memory_percent=None if rates is None else int(rates.memory),
            process_gpu_percent=self._process_percent(handle, pid),
        )

    def _mode(self, handle: Any, processes: Mapping[int, NvmlProcess]) -> NvmlMode:
        nvml = self.nvml
        name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        virtualization = self.ask(nvml.nvmlDeviceGetVirtualizationMode, handle)
        compute_mode = self.ask(nvml.nvmlDeviceGetComputeMode, handle)
        return NvmlMode(
            mig_profile=_mig_profile(name) if uuid.startswith("MIG-") else None,
            vgpu=virtualization == VIRTUALIZATION_MODE_VGPU,
            mps=bool(self.ask(nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle))
            or "CUDA_MPS_PIPE_DIRECTORY" in self.environ
            or any(process.name == MPS_SERVER for process in processes.values()),
            exclusive_process=compute_mode == COMPUTE_MODE_EXCLUSIVE_PROCESS,
        )

    def _memory(self, handle: Any) -> Any:
        # Drivers before 510 only know the first form, whose `used` includes the driver's reserve.
        newer = self.ask(self.nvml.nvmlDeviceGetMemoryInfo, handle, MEMORY_INFO_V2)
        return self.nvml.nvmlDeviceGetMemoryInfo(handle) if newer is None else newer

    def _processes(self, handle: Any) -> dict[int, NvmlProcess] | None:
        listed = [
            self.ask(self.nvml.nvmlDeviceGetComputeRunningProcesses, handle),
            self.ask(self.nvml.nvmlDeviceGetGraphicsRunningProcesses, handle),
            self.ask(self.nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle),
        ]
        if all(entries is None for entries in listed):
            return None
        used: dict[int, int | None] = {}
        for entries in listed:
            for entry in entries or ():
                # A process that computes and draws stands in two lists with the same bytes.
                known = max(used.get(entry.pid) or 0, entry.usedGpuMemory or 0)
                used[entry.pid] = known or None
        return {pid: NvmlProcess(pid, self._name(pid), used[pid]) for pid in sorted(used)}

    def _name(self, pid: int) -> str | None:
        name = self.ask(self.nvml.nvmlSystemGetProcessName, pid)
        return re.split(r"[/\\]", name.split(" ")[0])[-1] or None if name else None

    def _process_percent(self, handle: Any, pid: int) -> int | None:
        # NVML raises "not found" where it has no sample, which is the rule for a short test.
        samples = self.ask(self.nvml.nvmlDeviceGetProcessUtilization, handle, 0) or ()
        own = [sample for sample in samples if sample.pid == pid]
        return int(max(own, key=lambda sample: int(sample.timeStamp)).smUtil) if own else None

    def _find(self, device: int | str) -> Any:
        wanted = self._visible(device) if isinstance(device, int) else device
        return self._by_uuid(wanted) if isinstance(wanted, str) else wanted

    def _visible(self, index: int) -> Any:
        """What CUDA's ``index`` stands for: a UUID (possibly shortened) or a handle of NVML's."""
        handles = list(self._handles())
        visible = self.environ.get("CUDA_VISIBLE_DEVICES")
        entries = visible_devices(visible, len(handles))
        if not 0 <= index < len(entries):
            shown = "unset" if visible is None else repr(visible)
            raise _NoDeviceError(
                f"there is no CUDA device {index}: NVML sees {len(handles)}, "
                f"CUDA_VISIBLE_DEVICES is {shown}"
            )
        entry = entries[index]
        if isinstance(entry, str):
            return entry
        self._require_one_order(handles)
        return handles[entry]

    def _require_one_order(self, handles: Sequence[Any]) -> None:
        # CUDA counts the fastest first unless told otherwise, NVML by PCI bus: only equal devices
        # are counted alike.
        if self.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return
        if len({self.nvml.nvmlDeviceGetName(handle) for handle in handles}) > 1:
            raise _NoDeviceError(
                "the GPUs differ and CUDA may count them in another order than NVML: "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )

    def _by_uuid(self, wanted: str) -> Any:
        complete = wanted.startswith(("GPU-", "MIG-"))
        candidates = (wanted,) if complete else (f"GPU-{wanted}", f"MIG-{wanted}")
        for candidate in candidates:
            handle = self.ask(self.nvml.nvmlDeviceGetHandleByUUID, candidate)
            if handle is not None:
                return handle
        everything = [
            one for handle in self._handles() for one in (handle, *self._instances(handle))
        ]
        found = [
            handle
            for handle in everything
            if str(self.ask(self.nvml.nvmlDeviceGetUUID, handle)).startswith(candidates)
        ]
        if len(found) == 1:
            return found[0]
        trouble = "more than one device matches" if found else "NVML sees no device with"
        raise _NoDeviceError(f"{trouble} the UUID {wanted!r}")

    def _handles(self) -> Iterator[Any]:
        for index in range(self.nvml.nvmlDeviceGetCount()):
            yield self.nvml.nvmlDeviceGetHandleByIndex(index)

    def _instances(self, handle: Any) -> Iterator[Any]:
        mode = self.ask(self.nvml.nvmlDeviceGetMigMode, handle)
        if mode is None or mode[0] != MIG_ENABLED:
            return
        for index in range(self.ask(self.nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = self.ask(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if instance is not None:
                yield instance

    def _instance(self, handle: Any) -> Any:
        """The device itself, or the instance of a GPU in MIG mode that CUDA would use.

        That is the first, unless CUDA_VISIBLE_DEVICES names another: torch may tell the UUID of
        the whole GPU.
        """
        visible = self.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        wanted = tuple(text for text in map(str.strip, visible) if text.startswith("MIG-"))
        instances = list(self._instances(handle))
        named = (one for one in instances if self.nvml.nvmlDeviceGetUUID(one).startswith(wanted))
        return next(named, instances[0] if instances else handle)


def visible_devices(value: str | None, count: int) -> list[int | str]:
    """The devices CUDA sees, in CUDA's order: indices of ``count`` devices, or UUID beginnings.

    ``value`` is ``CUDA_VISIBLE_DEVICES``: enumeration stops at the first entry that is no device,
    and a repeated entry makes all of them invisible (CUDA C++ Programming Guide, "CUDA
    Environment Variables"; ``torch.cuda._parse_visible_devices``).
    """
    if value is None:
        return list(range(count))
    entries: list[int | str] = []
    for text in (part.strip() for part in value.split(",")):
        entry = _visible_entry(text, count)
        if entry is None:
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries


def _visible_entry(text: str, count: int) -> int | str | None:
    if text.startswith(("GPU-", "MIG-")):
        return text
    digits = re.match(r"\+?\d+", text)
    return int(digits[0]) if digits and int(digits[0]) < count else None


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
