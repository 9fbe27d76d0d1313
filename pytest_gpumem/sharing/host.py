"""A real device as all processes of its host use it: read by NVML, without a CUDA context."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import psutil

from pytest_gpumem.measurement.nvml import NvmlAbsent, NvmlMemory, NvmlReading, read_device
from pytest_gpumem.measurement.nvml_library import Nvml
from pytest_gpumem.sharing.database import SharingError
from pytest_gpumem.sharing.processes import UNKNOWN_PROCESS

CONTEXT = 600 * 2**20
"""Bytes of a CUDA context that has not been measured: 300 to 600 MB are usual."""

MARGIN = 0.02
"""Share of a device that is left free for undeclared memory: library handles and kernels."""


class NvmlDevice:
    """A GPU or MIG instance, as NVML reads it; ``name`` is its UUID."""

    def __init__(
        self,
        reading: NvmlReading,
        nvml: Nvml | None = None,
        *,
        has_context: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = reading.uuid
        self.total = min(reading.total, reading.mode.limit or reading.total)
        """Bytes of the device that this container may use, all processes together."""
        self._memory = NvmlMemory(reading.uuid, nvml)
        self._has_context = has_context

    @classmethod
    def find(cls, index: int, has_context: Callable[[], bool]) -> NvmlDevice:
        """Return CUDA's device ``index``; ``has_context`` returns whether this process uses it."""
        reading = read_device(index)
        if isinstance(reading, NvmlAbsent):
            raise _blind(reading.reason)
        return cls(reading, has_context=has_context)

    @property
    def capacity(self) -> int:
        """Bytes that tests may have, all together."""
        return round(self.total * (1 - MARGIN))

    def taken(self) -> Mapping[int, int]:
        """Return the bytes that each process holds, those of no process as :data:`UNKNOWN_PROCESS`.

        All bytes are such, where NVML's PIDs are those of another PID namespace (host or
        container): it lists PIDs that do not exist in this one, or omits this process though it
        uses the device.
        """
        try:
            used, listed = self._memory.read()
        except LookupError as error:
            raise _blind(str(error)) from error
        is_missed = self._has_context() and os.getpid() not in listed
        if is_missed or not all(psutil.pid_exists(pid) for pid in listed):
            return {UNKNOWN_PROCESS: used}
        known = {pid: size for pid, size in listed.items() if size}
        rest = used - sum(known.values())
        return {**known, UNKNOWN_PROCESS: rest} if rest > 0 else known


def _blind(reason: str) -> SharingError:
    return SharingError(f"--gpumem-share needs NVML to see what the GPU holds: {reason}")
