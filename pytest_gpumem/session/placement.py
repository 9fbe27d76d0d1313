"""The choice of this process's device before CUDA starts, by variables that CUDA reads then."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.device.host_gpus import host_gpus
from pytest_gpumem.sharing.database import SharingError, default_folder
from pytest_gpumem.sharing.host import CONTEXT
from pytest_gpumem.sharing.placement import CandidateDevice, take_place
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from pytest_gpumem.measurement.nvml import NvmlReading
    from pytest_gpumem.option_values import Quota
    from pytest_gpumem.options import Settings

VISIBLE = "CUDA_VISIBLE_DEVICES"
MPS_THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MPS_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def place(settings: Settings) -> Callable[[], None]:
    """Give this process its device, and its share of it under MPS; return the way back.

    Does nothing where tests are simulated, and to a variable that the user has set for MPS. Raises
    ``pytest.UsageError`` where the table of places cannot be used.
    """
    patches = pytest.MonkeyPatch()
    gpus = host_gpus(settings.device)
    if not gpus:
        return patches.undo
    own = gpus[0]
    if settings.share and settings.device.index is None and len(gpus) > 1:
        try:
            own = gpus[take_place(default_folder(), [candidate_of(gpu) for gpu in gpus])]
        except SharingError as error:
            raise pytest.UsageError(str(error)) from None
        patches.setenv(VISIBLE, visible(own, gpus))
    if settings.quota is not None and own.mode.mps:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        for name, value in part_of_mps(settings.quota, own.total, workers).items():
            if name not in os.environ:
                patches.setenv(name, value)
    return patches.undo


def candidate_of(gpu: NvmlReading) -> CandidateDevice:
    """Return the room for a worker on ``gpu``."""
    taken = {process.pid: process.used or 0 for process in gpu.others or ()}
    taken[0] = max(gpu.used - sum(taken.values()), 0)
    is_exclusive = gpu.mode.is_exclusive or gpu.mode.prohibited
    is_for_one = is_exclusive or gpu.mode.mig_profile is not None
    return CandidateDevice(
        name=gpu.uuid,
        total=min(gpu.total, gpu.mode.limit or gpu.total),
        taken=taken,
        most_workers=int(not gpu.mode.prohibited) if is_for_one else None,
        strict=is_exclusive,
    )


def visible(own: NvmlReading, gpus: Sequence[NvmlReading]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process whose own device, ``cuda:0``, is ``own``.

    The other GPUs stay visible behind it, for tests that use several; of MIG instances CUDA can
    use only one (NVIDIA's MIG guide, "CUDA Device Enumeration").
    """
    if own.uuid.startswith("MIG-"):
        return own.uuid
    others = [gpu.uuid for gpu in gpus if gpu.uuid.startswith("GPU-") and gpu.uuid != own.uuid]
    return ",".join([own.uuid, *others])


def part_of_mps(quota: Quota, total: int, workers: int) -> Mapping[str, str]:
    """Return the variables that hold a client of MPS to ``quota``, threads and memory.

    The limit includes CUDA's own allocations, so a context is added. Source: NVIDIA's
    Multi-Process Service guide, "Appendix: Environment Variables".
    """
    size = quota.of(total, workers)
    threads = min(max(round(100 * size / total), 1), 100)
    return {MPS_THREADS: str(threads), MPS_MEMORY: f"0={ceil((size + CONTEXT) / MIB)}M"}
