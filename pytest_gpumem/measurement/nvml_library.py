"""NVML's library: loading it, calling it, and searching for a device.

A value that a device or driver does not provide, or that a permission denies, is ``None``. An
error that makes every call fail is raised; :func:`reason_of` returns its cause.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")

# nvml.h, nvmlReturn_t: the errors that users meet, in plain words.
REASONS: Mapping[int, str] = {
    4: "NVML refuses access to the device (insufficient permissions)",
    9: "the NVIDIA driver is not loaded",
    12: "NVML's shared library was not found, so no NVIDIA driver is installed",
    15: "the GPU has fallen off the bus",
    18: "the NVIDIA driver and NVML's library are of different versions (reboot after an update)",
}

MEMORY_INFO_V2 = 0x02000028  # nvml.h, nvmlMemory_v2: `used` without the driver's reserve
MIG_ENABLED = 1  # nvml.h, NVML_DEVICE_MIG_ENABLE


Nvml = Any
"""The module ``pynvml`` of the package nvidia-ml-py, which has no types."""


class NoDeviceError(Exception):
    """A requested device that cannot be found; the message is the reason."""


def load_nvml() -> Nvml | None:
    """Return the library, ``None`` where the package nvidia-ml-py is not installed."""
    try:
        with warnings.catch_warnings():
            # The superseded package `pynvml` warns on import, but it works, too.
            warnings.simplefilter("ignore")
            return import_module("pynvml")
    except ImportError:
        return None


def reason_of(error: Exception) -> str:
    """Return one clause on the cause of an error of NVML."""
    if isinstance(error, NoDeviceError):
        return str(error)
    return REASONS.get(getattr(error, "value", 0), f"NVML says: {error}")


@dataclass(frozen=True)
class NvmlSession:
    """A session of the initialised library."""

    nvml: Nvml

    def query(self, call: Callable[..., T], *args: Any) -> T | None:
        """Return the result of ``call``, ``None`` where device, driver or permission deny it."""
        try:
            return call(*args)
        except (self.nvml.NVMLError, UnicodeDecodeError):
            return None

    def memory(self, handle: Any) -> Any:
        """Return the total, used and free bytes."""
        # Drivers before 510 only know the first form, whose `used` includes the driver's reserve.
        newer = self.query(self.nvml.nvmlDeviceGetMemoryInfo, handle, MEMORY_INFO_V2)
        return self.nvml.nvmlDeviceGetMemoryInfo(handle) if newer is None else newer

    def used_by_process(self, handle: Any) -> dict[int, int | None] | None:
        """Return the bytes of every process listed, ``None`` where there is no list at all."""
        listed = [
            self.query(self.nvml.nvmlDeviceGetComputeRunningProcesses, handle),
            self.query(self.nvml.nvmlDeviceGetGraphicsRunningProcesses, handle),
            self.query(self.nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle),
        ]
        if all(entries is None for entries in listed):
            return None
        used: dict[int, int | None] = {}
        for entries in listed:
            for entry in entries or ():
                # A process with compute and graphics contexts is in two lists, with the same bytes.
                known = max(used.get(entry.pid) or 0, entry.usedGpuMemory or 0)
                used[entry.pid] = known or None
        return used

    def process_name(self, pid: int) -> str | None:
        """Return the name of the program that a process runs."""
        name = self.query(self.nvml.nvmlSystemGetProcessName, pid)
        return re.split(r"[/\\]", name.split(" ")[0])[-1] or None if name else None

    def find(self, device: int | str) -> Any:
        """Return the handle of CUDA's index or a UUID; raises :class:`NoDeviceError`."""
        if isinstance(device, str):
            return self.by_uuid(device)
        handles = list(self.handles())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        entries = visible_devices(visible, len(handles))
        if not 0 <= device < len(entries):
            shown = "unset" if visible is None else repr(visible)
            raise NoDeviceError(
                f"there is no CUDA device {device}: NVML sees {len(handles)}, "
                f"CUDA_VISIBLE_DEVICES is {shown}"
            )
        entry = entries[device]
        if isinstance(entry, str):
            return self.by_uuid(entry)
        self.require_one_order(handles)
        return handles[entry]

    def require_one_order(self, handles: Sequence[Any]) -> None:
        """Raise :class:`NoDeviceError` where CUDA's indices may mean other devices than NVML's."""
        # CUDA lists the fastest device first by default, NVML follows the PCI bus: the orders
        # surely agree only for equal devices.
        if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return
        if len({self.nvml.nvmlDeviceGetName(handle) for handle in handles}) > 1:
            raise NoDeviceError(
                "the GPUs differ and CUDA may count them in another order than NVML: "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )

    def by_uuid(self, wanted: str) -> Any:
        """Return the handle of a UUID or its beginning; raises :class:`NoDeviceError`."""
        complete = wanted.startswith(("GPU-", "MIG-"))
        candidates = (wanted,) if complete else (f"GPU-{wanted}", f"MIG-{wanted}")
        for candidate in candidates:
            handle = self.query(self.nvml.nvmlDeviceGetHandleByUUID, candidate)
            if handle is not None:
                return handle
        everything = [one for handle in self.handles() for one in (handle, *self.instances(handle))]
        found = [
            handle
            for handle in everything
            if str(self.query(self.nvml.nvmlDeviceGetUUID, handle)).startswith(candidates)
        ]
        if len(found) == 1:
            return found[0]
        trouble = "more than one device matches" if found else "NVML sees no device with"
        raise NoDeviceError(f"{trouble} the UUID {wanted!r}")

    def handles(self) -> Iterator[Any]:
        """Yield every GPU, in NVML's order."""
        for index in range(self.nvml.nvmlDeviceGetCount()):
            yield self.nvml.nvmlDeviceGetHandleByIndex(index)

    def instances(self, handle: Any) -> Iterator[Any]:
        """Yield the instances of a GPU that MIG divides."""
        mode = self.query(self.nvml.nvmlDeviceGetMigMode, handle)
        if mode is None or mode[0] != MIG_ENABLED:
            return
        for index in range(self.query(self.nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = self.query(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if instance is not None:
                yield instance

    def instance(self, handle: Any) -> Any:
        """Return the device itself, or the instance of a GPU in MIG mode that CUDA would use.

        It is the first, unless CUDA_VISIBLE_DEVICES names another: torch may report the UUID of
        the whole GPU.
        """
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        wanted = tuple(text for text in map(str.strip, visible) if text.startswith("MIG-"))
        instances = list(self.instances(handle))
        named = (one for one in instances if self.nvml.nvmlDeviceGetUUID(one).startswith(wanted))
        return next(named, instances[0] if instances else handle)


def visible_devices(value: str | None, count: int) -> list[int | str]:
    """Return CUDA's devices in its order: indices of ``count`` devices, or UUID beginnings.

    ``value`` is ``CUDA_VISIBLE_DEVICES``: enumeration stops at the first entry that is no device,
    and a repeated entry makes all of them invisible (CUDA C++ Programming Guide, "CUDA
    Environment Variables"; ``torch.cuda._parse_visible_devices``).
    """
    if value is None:
        return list(range(count))
    entries: list[int | str] = []
    for text in map(str.strip, value.split(",")):
        entry: int | str = text
        if not text.startswith(("GPU-", "MIG-")):
            digits = re.match(r"\+?\d+", text)
            if digits is None or int(digits[0]) >= count:
                break
            entry = int(digits[0])
        if entry in entries:
            return []
        entries.append(entry)
    return entries
