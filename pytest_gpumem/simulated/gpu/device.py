"""One simulated GPU: its catalogue entry, allocator and library workspaces."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from pytest_gpumem.device.collector import GROWTH, Collector
from pytest_gpumem.device.environment import Environment, alloc_conf_of_process, alloc_conf_variable
from pytest_gpumem.echo import quoted
from pytest_gpumem.simulated.allocator import (
    Allocator,
    AllocatorError,
    AllocatorSettings,
    OutOfMemory,
)
from pytest_gpumem.simulated.allocator.addresses import (
    DEVICE_ADDRESSES,
    FIRST_ADDRESS,
    DriverAddresses,
)
from pytest_gpumem.simulated.allocator.blocks import SHARED_POOL, PoolId
from pytest_gpumem.simulated.allocator.device_memory import SharedDevice
from pytest_gpumem.simulated.allocator.messages import OutOfMemoryFields
from pytest_gpumem.simulated.allocator.timeline import Timeline
from pytest_gpumem.simulated.allocator.trace import Contexts, Recording, TraceEntry
from pytest_gpumem.simulated.common.callsite import RELEASED, Provenance, provenance
from pytest_gpumem.simulated.gpu.catalogue import GpuError, GpuModel, Machine, find_machine
from pytest_gpumem.simulated.gpu.estimates import Estimates
from pytest_gpumem.simulated.gpu.workspaces import Version, Workspaces
from pytest_gpumem.simulated.machine.storages import SimulatedStorage
from pytest_gpumem.simulated.simulation import Simulation

OLDEST: Version = (2, 6)


class SimulatedGPU:
    """A CUDA device of ``model`` that computes shapes only.

    ``alloc_conf`` and ``cublas_workspace_config`` stand for PYTORCH_CUDA_ALLOC_CONF and
    CUBLAS_WORKSPACE_CONFIG; ``None`` reads the environment, the second where torch reads it: see
    :mod:`~pytest_gpumem.simulated.gpu.workspace_settings`. ``torch_version`` (``"2.6"``) says
    whose rules the allocator and the workspaces follow; the default is the torch that runs.
    With ``real_values`` all values are computed on the CPU.
    Raises ``ValueError`` for an unknown model, version or setting.
    """

    def __init__(
        self,
        model: str | GpuModel,
        *,
        alloc_conf: str | None = None,
        torch_version: str | None = None,
        cublas_workspace_config: str | None = None,
        index: int = 0,
        real_values: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        self.model = model if isinstance(model, GpuModel) else _single(model)
        self.version = parse_version(torch_version)
        self.index = index
        self._real_values = real_values
        self.timeline = Timeline() if timeline is None else timeline
        self.uncached = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"
        self.torch_device = torch.device("cuda", index)
        self.alloc_conf = alloc_conf_of_process(self.version) if alloc_conf is None else alloc_conf
        self._workspace_config = cublas_workspace_config
        """``None`` where the environment says it, which code under test may change."""
        self.cublas_workspace_config = (
            os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
            if cublas_workspace_config is None
            else cublas_workspace_config
        )
        try:
            self._settings = AllocatorSettings.parse(self.alloc_conf, version=self.version)
            self.allocator = self._empty_memory()
        except AllocatorError as error:
            if alloc_conf is not None:
                raise
            name = alloc_conf_variable(self.version)
            raise AllocatorError(
                f"{name}={quoted(self.alloc_conf)} cannot be used: {str(error).rstrip('.')}; "
                "write it as torch reads it, or unset it"
            ) from error
        self.workspaces = self.workspaces_in(self.allocator)
        self._open_logs: list[SetupLog] = []
        self.shared: SharedDevice | None = None
        """What other processes take from too; ``None`` for a device of this process alone."""
        self._collector: Collector | None = None
        self.estimates = Estimates(self._allocated_and_peak)
        self.frugal_plans: set[object] = set()
        """Calls of cuDNN whose workspace once did not fit: they do without from then on."""

    @classmethod
    def machine(cls, name: str | GpuModel | Machine, **settings: Any) -> tuple[SimulatedGPU, ...]:
        """The GPUs of the machine ``name``, like ``"A100-80GB*2"``: ``cuda:0``, ``cuda:1``, ...

        ``settings`` are those of the constructor, and so are the errors.
        """
        machine = find_machine(name)
        timeline = Timeline()
        gpus = tuple(
            cls(machine.model, index=i, timeline=timeline, **settings) for i in range(machine.count)
        )
        simulation = Simulation(gpus, real_values=gpus[0]._real_values)
        for gpu in gpus:
            gpu.simulation = simulation
        return gpus

    @cached_property
    def simulation(self) -> Simulation:
        """The machine that this device is in; alone where nobody put it into another."""
        return Simulation([self], real_values=self._real_values)

    @property
    def stream(self) -> int:
        """Handle of the stream that work goes to now."""
        return self.simulation.streams.current(self.index)

    @property
    def environment(self) -> Environment:
        """What the numbers of this device depend on."""
        major, minor = self.model.compute_capability
        return Environment(
            simulated=True,
            gpu=Machine(self.model, len(self.simulation.gpus)).name,
            compute_capability=f"{major}.{minor}",
            torch=f"{self.version[0]}.{self.version[1]}",
            alloc_conf=self.alloc_conf,
            cublas_workspace_config=self.cublas_workspace_config,
        )

    @contextmanager
    def active(self) -> Iterator[SimulatedGPU]:
        """Serve ``cuda`` from this device."""
        with self.simulation.active():
            yield self

    @contextmanager
    def logging(self) -> Iterator[SetupLog]:
        """Log what is allocated inside, so that :meth:`renew` can do it again.

        What a log inside this one records is left to that one.
        """
        log = SetupLog()
        trace = self.allocator.trace
        outer = self._open_logs[-1] if self._open_logs else None
        if outer is not None:
            outer.events += trace[outer.position :]
        log.position = len(trace)
        self._open_logs.append(log)
        try:
            yield log
        finally:
            self._open_logs.pop()
            log.events += trace[log.position :]
            if outer is not None:
                outer.position = len(trace)
            addresses = {event.addr for event in log.events}
            log.records = self.simulation.storages.at(addresses, self.allocator)

    def renew(self, logs: Iterable[SetupLog]) -> None:
        """Go on with an empty allocator in which only ``logs`` have happened, in this order.

        What they allocated and still lives moves over; everything else stays behind and is seen no
        more. So what a test finds does not depend on the tests before it, to the last address.
        """
        self.workspaces.clear()
        self.workspaces.settings.forget()
        self.allocator.share(None)
        if self.shared is not None:
            self.shared.give_all()
        memory = self._empty_memory()
        memory.share(self.shared)
        for log in logs:
            addresses: dict[int, int] = {}
            for event in log.events:
                if event.action == "alloc":
                    address = memory.malloc(event.size, event.stream, event.context)
                    addresses[event.addr] = address
                elif event.action == "free_completed" and event.addr in addresses:
                    memory.free(addresses.pop(event.addr))
            for before, address in addresses.items():
                record = log.records.get(before)
                if record is None or record() is None:
                    memory.free(address)
                else:
                    record.allocator, record.address = memory, address
            memory.empty_cache()
        memory.trace.clear()
        memory.reset_peak_stats()
        memory.collector = self._collector
        memory.observers = self.allocator.observers
        self.allocator = self.workspaces.memory = memory
        self.estimates = Estimates(self._allocated_and_peak)
        self.frugal_plans.clear()

    def share(self, shared: SharedDevice | None) -> None:
        """Take memory from ``shared`` from now on; what is held already is not counted there."""
        self.shared = shared
        self.allocator.share(shared)

    def restart_collector(self, collector: Collector) -> None:
        """Let ``collector`` run when there are so many blocks more than now."""
        self._collector = self.allocator.collector = collector
        self.allocator.growth = 0

    @property
    def left_behind(self) -> int:
        """Bytes of live blocks that :meth:`renew` did not take along."""
        return sum(
            record.allocator.block(record.address)
            for record in list(self.simulation.storages.by_key.values())
            if record.device is self and record.allocator is not self.allocator and record.address
        )

    def workspaces_in(self, memory: Memory) -> Workspaces:
        """Return workspaces that are taken from ``memory``; none is there yet."""
        return Workspaces(
            memory,
            self.version,
            self.model.compute_capability,
            self._workspace_config,
            lambda: torch._C._current_graph_task_id() != -1,
        )

    def memory_beside(self) -> Memory:
        """Return an empty memory of this GPU whose addresses no other has."""
        return self._empty_memory(self.index + len(self.simulation.gpus))

    def _empty_memory(self, place: int | None = None) -> Memory:
        place = self.index if place is None else place
        memory = Memory(
            self.model.total_memory,
            settings=self._settings,
            version=self.version,
            device=self.index,
            place_segment=DriverAddresses(FIRST_ADDRESS + (place + 1) * DEVICE_ADDRESSES),
            timeline=self.timeline,
        )
        memory.enable_caching(not self.uncached)
        return memory

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that readers of the numbers have to know."""
        estimate = self.estimates.note
        return (*self.simulation.notes, *([] if estimate is None else [estimate]))

    @property
    def estimated(self) -> int:
        """Bytes of the highest peak allocated whose number only a closed library knows."""
        return self.estimates.in_peak

    def _allocated_and_peak(self) -> tuple[int, int]:
        return self.allocator.allocated, self.allocator.peak_allocated


@dataclass(eq=False)
class SetupLog:
    """What happened to a device while something was set up."""

    events: list[TraceEntry] = field(default_factory=list)
    records: dict[int, SimulatedStorage] = field(default_factory=dict)
    """By address: the storages that were left in the end."""
    position: int = 0


class Memory(Allocator):
    """The caching allocator, with stacks, and torch's own exception when the GPU is full.

    Python's garbage collector may run wherever an object is made, here too, and the storages that
    it finds give back their blocks at once. In C++ it cannot come in between: what is freed while
    an operation is under way waits for its end.
    """

    history = True
    """Whether allocations remember where in the code they were made."""
    collector: Collector | None = None
    """What is told when there are many blocks more; ``None`` where CPython itself sees to it."""
    growth = 0
    """Blocks made since then less those freed, but never below zero, as CPython counts."""

    _recording: Recording | None = None
    """What ``_record_memory_history`` was told last."""
    _collects_frees = False
    """Whether frees remember theirs, too: ``_record_memory_history(context="all")``."""

    def __init__(self, total_memory: int, **options: Any) -> None:
        self._busy = False
        self.observers: list[Callable[[int, int, int, int], object]] = []
        """Called with device, bytes of the segment, allowed and free bytes, when memory is out."""
        self._freed_meanwhile: deque[tuple[int, Any]] = deque()
        super().__init__(total_memory, **options)

    def malloc(self, size: int, stream: int = 0, context: object = None) -> int:
        """Allocate ``size`` bytes; raises ``torch.OutOfMemoryError``."""
        self.growth += 1
        if self.growth > GROWTH and self.collector is not None:
            self.growth = 0
            self.collector.grown()
        if context is None and self.history:
            context = provenance()
        if self._recording is not None and isinstance(context, Provenance):
            context.record(self._recording)
        self._busy = True
        try:
            address = Allocator.malloc(self, size, stream, context)
            if address and isinstance(context, Provenance):
                context.nbytes = self.block(address)
            return address
        except OutOfMemory as error:
            if error.tried_everything and self.observers:
                self._busy = False
                self._tell_observers(error.fields)
            raise torch.OutOfMemoryError(str(error)) from None
        finally:
            self._busy = False
            if self._freed_meanwhile:
                self._free_late()

    def free(self, address: int, context: Any = None) -> None:
        """Give a block back, after the operation that is under way."""
        if self.growth:
            self.growth -= 1
        if context is None and self._collects_frees:
            context = self._context_of_now()
        if self._busy:
            self._freed_meanwhile.append((address, context))
            return
        self._busy = True
        try:
            Allocator.free(self, address, context)
        finally:
            self._busy = False
            if self._freed_meanwhile:
                self._free_late()

    def empty_cache(self, pool: PoolId = SHARED_POOL, context: Any = None) -> None:
        """Return every segment without a live block to the device."""
        if context is None and self._collects_frees:
            context = self._context_of_now()
        with self._undisturbed():
            super().empty_cache(pool, context)

    def record_history(self, recording: Recording, *, clear: bool = False) -> None:
        """Do what ``torch.cuda.memory._record_memory_history`` does."""
        self.trace.record(recording, clear=clear)
        self._recording = recording
        self._collects_frees = recording.on and recording.contexts is Contexts.ALL

    def _tell_observers(self, fields: OutOfMemoryFields) -> None:
        """``oom_observers_`` of c10/cuda/CUDACachingAllocator.cpp, before the error is raised."""
        allowed = fields.total if fields.limit is None else fields.limit
        for observer in tuple(self.observers):
            observer(self.device, fields.segment, allowed, fields.free)

    def _context_of_now(self) -> Provenance:
        context = provenance()
        context.operator = RELEASED
        if self._recording is not None:
            context.record(self._recording)
        return context

    def segments(self, pool: PoolId = SHARED_POOL, *, frames: bool = True) -> list[dict[str, Any]]:
        """Describe the segments and their blocks, by address."""
        with self._undisturbed():
            return super().segments(pool, frames=frames)

    def live_blocks(self) -> dict[int, int]:
        """Address and size of every live block."""
        with self._undisturbed():
            return super().live_blocks()

    def live_contexts(self) -> dict[int, Any]:
        """Address and context of every live block."""
        with self._undisturbed():
            return super().live_contexts()

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self._free_late()

    def _free_late(self) -> None:
        freed = self._freed_meanwhile
        self._busy = True
        try:
            while freed:
                Allocator.free(self, *freed.popleft())
        finally:
            self._busy = False


def _single(name: str) -> GpuModel:
    machine = find_machine(name)
    if machine.count > 1:
        raise GpuError(
            f"{quoted(name)} is a machine with {machine.count} GPUs and not one of them; write "
            f'"{machine.model.name}"'
        )
    return machine.model


def parse_version(text: str | None) -> Version:
    """``"2.6"`` or ``"2.11.0+cu130"`` -> ``(2, 6)``; ``None`` is the torch that runs."""
    found = re.match(
        r"([0-9]{1,4})\.([0-9]{1,4})", torch.__version__ if text is None else str(text)
    )
    version = (int(found[1]), int(found[2])) if found else None
    if version is None or version < OLDEST:
        raise ValueError(
            f"torch_version={quoted(text)} is not a release this simulation knows: "
            f'write 2.6 or later, as in torch_version="2.11"'
        )
    return version
