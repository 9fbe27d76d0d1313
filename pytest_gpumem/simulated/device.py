"""One simulated GPU: its catalogue entry, allocator and library workspaces."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pytest_gpumem.device.environment import Environment, alloc_conf_of_process
from pytest_gpumem.simulated.allocator import Allocator, AllocatorSettings, OutOfMemory
from pytest_gpumem.simulated.allocator.trace import TraceEntry
from pytest_gpumem.simulated.callsite import current_stack
from pytest_gpumem.simulated.gpus import GpuModel, find_gpu
from pytest_gpumem.simulated.simulation import Simulation
from pytest_gpumem.simulated.storages import SimulatedStorage
from pytest_gpumem.simulated.workspaces import Version, Workspaces

OLDEST: Version = (2, 6)


class SimulatedGPU:
    """A CUDA device of ``model`` that computes shapes only.

    ``alloc_conf`` and ``cublas_workspace_config`` stand for PYTORCH_CUDA_ALLOC_CONF and
    CUBLAS_WORKSPACE_CONFIG; ``None`` reads the environment. ``torch_version`` (``"2.6"``) says
    whose rules the allocator and the workspaces follow; the default is the torch that runs.
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
    ) -> None:
        self.model = model if isinstance(model, GpuModel) else find_gpu(model)
        self.version = parse_version(torch_version)
        self.index = index
        self.stream = 0
        self.torch_device = torch.device("cuda", index)
        self.alloc_conf = alloc_conf_of_process(self.version) if alloc_conf is None else alloc_conf
        self.cublas_workspace_config = (
            os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
            if cublas_workspace_config is None
            else cublas_workspace_config
        )
        self._settings = AllocatorSettings.parse(self.alloc_conf, version=self.version)
        self.allocator = self._empty_memory()
        self.workspaces = Workspaces(
            self.allocator,
            self.version,
            self.model.compute_capability,
            self.cublas_workspace_config,
            lambda: torch._C._current_graph_task_id() != -1,
        )
        self.simulation = Simulation([self])
        self._open_logs: list[SetupLog] = []

    @property
    def environment(self) -> Environment:
        """What the numbers of this device depend on."""
        major, minor = self.model.compute_capability
        return Environment(
            simulated=True,
            gpu=self.model.name,
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
            log.records = self.simulation.storages.at({event.addr for event in log.events})

    def renew(self, logs: Iterable[SetupLog]) -> None:
        """Go on with an empty allocator in which only ``logs`` have happened, in this order.

        What they allocated and still lives moves over; everything else stays behind and is seen no
        more. So what a test finds does not depend on the tests before it, to the last address.
        """
        self.workspaces.clear()
        memory = self._empty_memory()
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
        self.allocator = self.workspaces.memory = memory

    @property
    def left_behind(self) -> int:
        """Bytes of live blocks that :meth:`renew` did not take along."""
        return sum(
            record.allocator.block(record.address)
            for record in self.simulation.storages.by_key.values()
            if record.device is self and record.allocator is not self.allocator and record.address
        )

    def _empty_memory(self) -> Memory:
        return Memory(
            self.model.total_memory,
            settings=self._settings,
            version=self.version,
            device=self.index,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that readers of the numbers have to know."""
        return tuple(self.simulation.notes)


@dataclass(eq=False)
class SetupLog:
    """What happened to a device while something was set up."""

    events: list[TraceEntry] = field(default_factory=list)
    records: dict[int, SimulatedStorage] = field(default_factory=dict)
    """By address: the storages that were left in the end."""
    position: int = 0


class Memory(Allocator):
    """The caching allocator, with stacks, and torch's own exception when the GPU is full."""

    history = True
    """Whether allocations remember where in the code they were made."""

    def malloc(self, size: int, stream: int = 0, context: object = None) -> int:
        """Allocate ``size`` bytes; raises ``torch.OutOfMemoryError``."""
        if context is None and self.history:
            context = current_stack()
        try:
            return super().malloc(size, stream, context)
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None


def parse_version(text: str | None) -> Version:
    """``"2.6"`` or ``"2.11.0+cu130"`` -> ``(2, 6)``; ``None`` is the torch that runs."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__ if text is None else str(text))
    version = (int(found[1]), int(found[2])) if found else None
    if version is None or version < OLDEST:
        raise ValueError(
            f"torch_version={text!r} is not a release this simulation knows: "
            f'write 2.6 or later, as in torch_version="2.11"'
        )
    return version
