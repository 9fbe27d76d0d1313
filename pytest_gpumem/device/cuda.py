"""A real CUDA device."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.thread import _worker
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from pytest_gpumem.device import DeviceError
from pytest_gpumem.device.device import Device, is_shared
from pytest_gpumem.device.quota import failed_allocations, limited, observers_of_torch
from pytest_gpumem.dry import scope
from pytest_gpumem.garbage import clear_frames_of_imports, collect_young
from pytest_gpumem.measurement.fixtures import Renewed
from pytest_gpumem.measurement.leftover import LeftoverSpace
from pytest_gpumem.measurement.nvml import NvmlReading, RepeatedReading, read_device
from pytest_gpumem.measurement.statistics import Block, CudaStatistics
from pytest_gpumem.quoting import quoted
from pytest_gpumem.sharing.admission import FailedAllocation
from pytest_gpumem.sharing.devices import CONTEXT, NvmlDevice
from pytest_gpumem.simulated.gpu.catalogue import GPUS, GpuModel, Machine
from pytest_gpumem.values.environment import Environment, alloc_conf_of_process
from pytest_gpumem.values.measurement import Measurement

FILLED_SHARE = 20
"""Leftover space is filled if it is at most the device's memory divided by this."""


def find_device(
    index: int | None, *, required: bool, of_rank: int | None = None
) -> CudaDevice | None:
    """Return the CUDA device ``index``, ``None`` where torch sees no device at all.

    Raises :class:`DeviceError` where it is ``required``, where there are fewer devices, or by
    :func:`check_allocator`. CUDA is not initialised. ``of_rank``: the rank that ``index`` was
    derived from, if the user gave none.
    """
    name = "cuda" if index is None else f"cuda:{index}"
    if not torch.cuda.is_available():
        if not required:
            return None
        raise DeviceError(
            f"--gpumem-device={name}, but torch {torch.__version__} sees no CUDA device; write "
            "--gpumem-device=auto or sim to run on a simulated one"
        )
    check_allocator()
    count = torch.cuda.device_count()
    if index is None or index < count:
        return CudaDevice(index)
    found = f"torch sees {count} CUDA device{'s' if count != 1 else ''}"
    if of_rank is not None:
        raise DeviceError(
            f"rank {of_rank} is to run on {name}, its LOCAL_RANK, but {found}: start as many ranks "
            "as there are, or simulate them with --gpumem-device=sim"
        )
    raise DeviceError(f"--gpumem-device={name}, but {found}; the last one is cuda:{count - 1}")


def check_allocator() -> None:
    """Raise :class:`DeviceError` if torch's allocator of CUDA memory has no snapshots."""
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise DeviceError(
            f"torch allocates by {quoted(backend)}, which does not report its blocks: measure with "
            "torch's native allocator"
        )


def device_count() -> int:
    """Return how many CUDA devices tests will see; does not initialise CUDA."""
    with scope.opened():
        return torch.cuda.device_count()


class CudaDevice(Device):
    """A CUDA device by ``index``; with ``None``, the current one."""

    context_bytes = CONTEXT
    """Bytes of a CUDA context where NVML does not report it."""

    def __init__(self, index: int | None) -> None:
        self._chosen = index is not None
        self.index = index or 0
        self._threads = LeftThreads()
        self._notes: tuple[str, ...] = ()
        self._space = LeftoverSpace()
        self._fixture_blocks: dict[object, frozenset[Block]] = {}
        """The blocks allocated by set-ups of shared fixtures."""
        self._shared: dict[str, tuple[int, NvmlDevice]] = {}
        """The devices shared with other processes and their CUDA indices here, by name."""

    @property
    def environment(self) -> Environment:
        return self._environment.with_extra(self.extra)

    @cached_property
    def _properties(self) -> Any:
        """The device's properties; a dry device, hidden between tests, is made visible for this."""
        with scope.opened():
            return torch.cuda.get_device_properties(self.index)

    @cached_property
    def _environment(self) -> Environment:
        properties = self._properties
        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        reading = read_device(_uuid(properties) or self.index)
        known = reading if isinstance(reading, NvmlReading) else None
        return Environment(
            simulated=False,
            gpu=properties.name,
            compute_capability=f"{properties.major}.{properties.minor}",
            torch=f"{major}.{minor}",
            cuda=torch.version.cuda,
            driver=known.driver if known else None,
            alloc_conf=alloc_conf_of_process((major, minor)),
            cublas_workspace_config=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
            partition=known.mode.partition if known else "",
        )

    @property
    def total_memory(self) -> int:
        total: int = self._properties.total_memory
        return total

    @property
    def machine(self) -> Machine:
        """The machine to simulate for comparison: these GPUs with their own properties.

        Its name is the catalogue's if that contains the model. This initialises CUDA.
        """
        properties = self._properties
        names = {known.full_name: known.name for known in GPUS.values()}
        model = GpuModel(
            name=names.get(properties.name, properties.name),
            full_name=properties.name,
            total_memory=properties.total_memory,
            compute_capability=(properties.major, properties.minor),
            sm_count=properties.multi_processor_count,
            max_threads_per_sm=properties.max_threads_per_multi_processor,
            l2_cache_bytes=properties.L2_cache_size,
            memory_gb_per_second=getattr(properties, "memory_clock_rate", 0)
            * getattr(properties, "memory_bus_width", 0)
            // 4_000_000,
        )
        return Machine(model, device_count())

    def active(self) -> AbstractContextManager[object]:
        """Make the device current if the user named it; else keep CUDA's current device."""
        return torch.cuda.device(self.index) if self._chosen else nullcontext()

    def begin_test(self, name: str, fixtures: Sequence[object], renewed: Renewed) -> None:
        """Fill the free space in segments of earlier tests, and record running threads.

        Does not initialise CUDA.
        """
        self._notes = self._threads.notes
        if torch.cuda.is_initialized():
            own = {block.address for one in fixtures for block in self._fixture_blocks.get(one, ())}
            self._space.fill(own.__contains__, self.total_memory // FILLED_SHARE)

    @property
    def filled(self) -> Mapping[int, int]:
        return self._space.filled

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Attribute threads that start inside to ``name``.

        Garbage collection is not changed: without it a body may run out of memory.
        """
        with self._threads.started_by(name), clear_frames_of_imports():
            try:
                yield
            finally:
                self._space.empty()

    def restart_collector(self) -> None:
        collect_young()

    @contextmanager
    def setting_up(self, fixture: object) -> Iterator[None]:
        """Attribute threads and blocks inside to ``fixture`` if tests share it."""
        if not is_shared(fixture):
            yield
            return
        before = CudaStatistics().live_blocks()
        with self._counting_threads(fixture):
            yield
        self._fixture_blocks[fixture] = CudaStatistics().live_blocks() - before

    def _counting_threads(self, fixture: object) -> AbstractContextManager[None]:
        """Return a context that attributes its threads to ``fixture`` if tests share it."""
        return self._threads.started_by(None) if is_shared(fixture) else nullcontext()

    def forget(self, fixture: object) -> None:
        self._fixture_blocks.pop(fixture, None)

    def complete(self, measurement: Measurement) -> Measurement:
        """Return ``measurement`` with notes on earlier tests' threads, which may add to it."""
        filled = self.filled.get(int(measurement.device.partition(":")[2]), 0)
        return replace(
            measurement,
            stray=max(measurement.stray - filled, 0),
            notes=measurement.notes + self._notes,
        )

    def share(self, folder: Path) -> Sequence[NvmlDevice]:
        """Return the visible devices, read by NVML, its own first; raises ``SharingError``."""
        others = [index for index in range(device_count()) if index != self.index]
        for index in (self.index, *others):
            has_context = torch.cuda.is_initialized if index == self.index else lambda: False
            with scope.opened():
                device = NvmlDevice(index, has_context)
            self._shared[device.name] = index, device
        return [device for _, device in self._shared.values()]

    def held(self, name: str) -> tuple[int, int]:
        """Return the bytes of the CUDA context, from NVML or estimated, and the reserved bytes."""
        index, device = self._shared[name]
        return self._held(index, device)

    def _held(self, index: int, device: NvmlDevice | None) -> tuple[int, int]:
        estimate = self.context_bytes if index == self.index else 0
        if not torch.cuda.is_initialized():
            return estimate, 0
        reserved: int = torch.cuda.memory_reserved(index)
        used = device.taken().get(os.getpid()) if device else None
        return estimate if used is None else max(used - reserved, 0), reserved

    def limited(self, size: int) -> AbstractContextManager[None]:
        return limited(self.index, size)

    def failed_allocations(self) -> AbstractContextManager[Sequence[FailedAllocation]]:
        """Return the list that collects the allocator's refusals inside; initialises CUDA."""
        torch.cuda.init()

        def note(index: int, asked: int, free: int) -> FailedAllocation | None:
            if index != self.index:
                return None
            shared = (device for at, device in self._shared.values() if at == index)
            context, reserved = self._held(index, next(shared, None))
            return FailedAllocation(asked, reserved, free, self.total_memory, context)

        return failed_allocations(observers_of_torch(), note)

    def fault(self) -> str | None:
        return fault_of(self.index) if torch.cuda.is_initialized() else None

    @property
    def shares_faults(self) -> bool:
        """Whether the process is a client of an MPS server."""
        return "MPS" in self.environment.partition.split("-")

    def empty_cache(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def nvml(self) -> Mapping[str, Any]:
        return self._reading.read().to_dict()

    @cached_property
    def _reading(self) -> RepeatedReading:
        return RepeatedReading(_uuid(self._properties) or self.index)


def _uuid(properties: Any) -> str | None:
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


_LIBRARIES = frozenset({"multiprocessing", "torch", "tqdm"})


class LeftThreads:
    """The threads that outlive the tests that started them.

    Threads of executors are left out: they wait for tasks until their executor is shut down.
    """

    def __init__(self) -> None:
        self._owners: WeakKeyDictionary[threading.Thread, str | None] = WeakKeyDictionary()
        """The test that started each thread; ``None`` for a shared fixture."""

    @contextmanager
    def started_by(self, owner: str | None) -> Iterator[None]:
        """Record ``owner`` for threads that start inside and have no owner yet."""
        before = set(threading.enumerate())
        try:
            yield
        finally:
            for thread in set(threading.enumerate()) - before:
                if getattr(thread, "_target", None) is not _worker:
                    self._owners.setdefault(thread, owner)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each thread that still runs after its test."""
        return tuple(
            f"{owner} left {thread.name!r} running in a thread: what it allocates is counted here"
            for thread, owner in list(self._owners.items())
            if owner is not None and thread.is_alive() and not _is_of_library(thread)
        )


def _is_of_library(thread: threading.Thread) -> bool:
    """Return whether ``thread`` is a helper of a library's, or was started by C++.

    Inductor's compile workers and tqdm's monitor have such threads permanently, the queues of a
    ``DataLoader``'s workers for a short time.
    """
    found = getattr(thread, "_target", None) or type(thread)
    package = str(getattr(found, "__module__", "")).partition(".")[0]
    return isinstance(thread, threading._DummyThread) or package in _LIBRARIES


STICKY = (
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "the MPS client has been terminated",
)
"""Errors after which "the process must be terminated and relaunched" (driver_types.h of CUDA 12.4):
700, 702, 710, 714 to 719, and 810 of a client that its MPS server has terminated; the texts are
those of ``cudaGetErrorString`` of that release."""


def fault_of(index: int) -> str | None:
    """Return the first line of the sticky error of ``cuda:index``, ``None`` for none.

    Other errors are not sticky, such as that of a stream capture that a test leaves open.
    """
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        return text if any(sticky in text for sticky in STICKY) else None
    return None
