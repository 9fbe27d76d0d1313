"""The device of this process, chosen before CUDA starts, and the number of workers on GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import NamedTuple

import pytest

from pytest_gpumem.baseline.content import read_file
from pytest_gpumem.baseline.store import BaselineError
from pytest_gpumem.device.host_gpus import host_gpus
from pytest_gpumem.measurement.nvml import NvmlReading
from pytest_gpumem.option_values import Quota
from pytest_gpumem.options import Settings
from pytest_gpumem.sharing.admission import RESERVED_PER_ALLOCATED
from pytest_gpumem.sharing.database import SharingError, default_folder
from pytest_gpumem.sharing.devices import CONTEXT, CandidateDevice, take_place
from pytest_gpumem.sharing.devices import LEFT_FREE as LEFT_FREE
from pytest_gpumem.sizes import MIB

VISIBLE = "CUDA_VISIBLE_DEVICES"
MPS_THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MPS_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def place(settings: Settings) -> Callable[[], None]:
    """Set the variables for this process's device and MPS share; return a function that undoes it.

    Does nothing where tests are simulated, and keeps a variable that the user has set for MPS.
    Raises ``pytest.UsageError`` where the table of places cannot be used.
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
    """Return the entry of ``gpu`` in the choice of a device for this process."""
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

    The other GPUs follow it, for tests that use several. A process can use only one MIG instance
    (NVIDIA's MIG guide, "CUDA Device Enumeration").
    """
    if own.uuid.startswith("MIG-"):
        return own.uuid
    others = [gpu.uuid for gpu in gpus if gpu.uuid.startswith("GPU-") and gpu.uuid != own.uuid]
    return ",".join([own.uuid, *others])


def part_of_mps(quota: Quota, total: int, workers: int) -> Mapping[str, str]:
    """Return the variables that limit threads and memory of an MPS client by ``quota``.

    MPS counts CUDA's own allocations, too, so the size of a context is added. Source: NVIDIA's
    Multi-Process Service guide, "Appendix: Environment Variables".
    """
    size = quota.of(total, workers)
    threads = min(max(round(100 * size / total), 1), 100)
    return {MPS_THREADS: str(threads), MPS_MEMORY: f"0={ceil((size + CONTEXT) / MIB)}M"}


class Room(NamedTuple):
    """The room of one device for workers; bytes."""

    free: int
    context: int
    """The bytes that each worker needs besides its tests."""
    most_workers: int | None = None
    """The most workers of the device; ``None`` for no limit."""


def workers_by_memory(config: pytest.Config, settings: Settings) -> tuple[int, str] | None:
    """Return how many workers ``-n auto`` stands for, and the header's text on it.

    As many as fit the memory, and at most one for each core; ``None`` where pytest-xdist decides.
    """
    from xdist.plugin import pytest_xdist_auto_num_workers

    rooms, gpu = _rooms(settings)
    if not rooms:
        return None
    cores: int = pytest_xdist_auto_num_workers(config)
    needs = list(_needs(settings, gpu))
    if settings.quota is not None and not settings.quota.auto:
        most = settings.quota.of(max(room.free for room in rooms), 1)
        # Where no need is known, each worker counts with its quota.
        needs = [min(need, most) for need in needs] or [most]
    found = min(fitting(rooms, needs), cores)
    return found, f"-n auto: {found} of {cores} cores' workers fit the memory"


def fitting(rooms: Iterable[Room], needs: Sequence[float]) -> int:
    """Return the number of workers that can run tests at once: at least one.

    Each holds its context and a test of mean size; ``needs`` are the bytes of the tests whose
    needs are known. Additional workers would wait, and their contexts would use memory.
    """
    mean = sum(needs) / len(needs) if needs else 0.0
    total = 0
    for room in rooms:
        each = room.context + mean
        # Without known needs, only the number of cores limits workers.
        fit = int(room.free // each) if each else 2**16
        total += fit if room.most_workers is None else min(fit, room.most_workers)
    return max(total, 1)


def _rooms(settings: Settings) -> tuple[list[Room], str]:
    """Return the rooms of the devices, and the prefix of their folders of baselines."""
    if gpus := host_gpus(settings.device):
        used = gpus if settings.device.index is None else gpus[:1]
        rooms = [
            Room(round(one.room(()) - one.total * LEFT_FREE), CONTEXT, one.most_workers)
            for one in map(candidate_of, used)
        ]
        return rooms, f"cuda-{gpus[0].name}"
    if settings.device.kind not in ("sim", "auto"):
        return [], ""
    from pytest_gpumem.simulated.gpu.catalogue import find_machine

    machine = find_machine(settings.device.models[0])
    return [Room(machine.model.total_memory, 0)] * machine.count, f"sim-{machine.name}"


def _needs(settings: Settings, gpu: str) -> Iterator[float]:
    """Yield the needs of tests, from a common declaration, or from the baselines of this GPU."""
    for keyword, margin in (("max_reserved", 1.0), ("max", RESERVED_PER_ALLOCATED)):
        if declared := settings.defaults.get(keyword):
            yield declared * margin
            return
    beginning = re.sub(r"[^A-Za-z0-9._-]+", "-", gpu) + "-"
    for path in sorted(settings.baselines.glob("*/**/*.json")):
        folder = path.relative_to(settings.baselines).parts[0]
        if not folder.startswith(beginning):
            continue
        try:
            content = read_file(path, folder)
        except BaselineError:
            continue  # reported where a baseline is needed
        for entry in content.tests.values() if content else ():
            yield max(entry.peak_reserved, entry.peak_allocated * RESERVED_PER_ALLOCATED)
