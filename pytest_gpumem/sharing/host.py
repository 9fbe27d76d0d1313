"""A real device as all processes of its host see it: through NVML, without a CUDA context."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_gpumem.measurement.nvml import NvmlAbsent, NvmlReading, read_device
from pytest_gpumem.sharing.database import SharingError

CONTEXT = 600 * 2**20
"""Bytes of a CUDA context that has not been measured: 300 to 600 MB are usual."""

MARGIN = 0.02
"""Share of a device that is left free for what nobody announces, library handles and kernels."""


@dataclass(frozen=True)
class NvmlDevice:
    """One GPU or MIG instance; ``name`` is its UUID."""

    name: str
    total: int

    @classmethod
    def find(cls, index: int) -> NvmlDevice:
        """Return the device that CUDA calls ``index``; raises :class:`SharingError`."""
        reading = _read(index)
        return cls(reading.uuid, reading.total)

    @property
    def capacity(self) -> int:
        """Bytes that tests may have, all together."""
        return round(self.total * (1 - MARGIN))

    def taken(self) -> Mapping[int, int]:
        """Return the bytes that each process holds; 0 is nobody whose number NVML tells."""
        reading = _read(self.name)
        processes = {process.pid: process.used or 0 for process in reading.others or ()}
        if reading.process_used is not None:
            processes[os.getpid()] = reading.process_used
        rest = reading.used - sum(processes.values())
        return {**processes, 0: rest} if rest > 0 else processes


def _read(device: int | str) -> NvmlReading:
    reading = read_device(device)
    if isinstance(reading, NvmlAbsent):
        raise SharingError(f"--gpumem-share needs NVML to see what the GPU holds: {reading.reason}")
    return reading
