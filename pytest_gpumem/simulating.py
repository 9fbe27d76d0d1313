"""``simulate()``: unmodified CUDA code on a machine with no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from pytest_gpumem.allocator.snapshot import snapshot
from pytest_gpumem.dry import scope
from pytest_gpumem.garbage import Collector, clear_frames_of_imports
from pytest_gpumem.measurement.phases import PhaseTracker
from pytest_gpumem.measurement.recorded import SimulatedRecorder
from pytest_gpumem.measurement.statistics import Block, Bytes, CudaStatistics, Readings
from pytest_gpumem.simulated.common.callsite import running
from pytest_gpumem.simulated.compiled.entry import AUTO
from pytest_gpumem.simulated.distributed.nccl import sentence
from pytest_gpumem.simulated.distributed.worst import imbalance
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, find_machine
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.values.measurement import PhaseRecord
from pytest_gpumem.values.world import (
    World,
    WorldError,
    address_of_process,
    world_of,
    world_of_process,
)


class RankPeaks(NamedTuple):
    """The peaks of one rank, in bytes."""

    peak_allocated: int
    peak_reserved: int


class SimulatedRun:
    """The numbers of one ``with simulate(...)`` on its GPU, readable inside and afterwards.

    On a machine with several GPUs they are those of the first; :attr:`devices` has a run for each.
    """

    def __init__(
        self, gpu: SimulatedGPU, statistics: CudaStatistics, tracker: PhaseTracker
    ) -> None:
        self._gpu = gpu
        self._statistics = statistics
        self._statistics.listeners.append(self._raise_peaks)
        self._peak_allocated = 0
        self._peak_reserved = 0
        self._tracker = tracker
        self.devices: tuple[SimulatedRun, ...] = (self,)
        """A run for each GPU of the machine, by index; they share phases and notes."""
        self._of_ranks: tuple[RankPeaks, ...] = ()

    @property
    def model(self) -> GpuModel:
        """The GPU's catalogue entry."""
        return self._gpu.model

    @property
    def peak_allocated(self) -> int:
        """The highest bytes in live blocks so far, even if code reset torch's own peaks."""
        self._statistics.read_and_reset_peaks()
        return self._peak_allocated

    @property
    def peak_reserved(self) -> int:
        """The highest bytes in segments held from the driver so far."""
        self._statistics.read_and_reset_peaks()
        return self._peak_reserved

    @property
    def allocated(self) -> int:
        """The bytes in live blocks."""
        return self._gpu.allocator.allocated

    @property
    def reserved(self) -> int:
        """The bytes in segments held from the driver."""
        return self._gpu.allocator.reserved

    @property
    def estimated(self) -> int:
        """The bytes of the peak that are estimates: workspaces of cuDNN, which is closed source."""
        return self._gpu.estimated

    @property
    def phases(self) -> Mapping[str, PhaseRecord]:
        """The phases that have ended so far, by name."""
        workspaces = workspaces_of([self._gpu])
        return MappingProxyType(self._tracker.records(self._gpu.index, Bytes(), workspaces))

    @property
    def trace(self) -> Sequence[Any]:
        """The allocator's events, in order."""
        return self._gpu.allocator.trace

    @property
    def ranks(self) -> tuple[RankPeaks, ...]:
        """The peaks of each rank that torchrun has started, by rank; on rank 0, after the end.

        On other ranks, and in a single process, it has only this rank's peaks.
        """
        return self._of_ranks or (RankPeaks(self.peak_allocated, self.peak_reserved),)

    @property
    def notes(self) -> tuple[str, ...]:
        """The sentences that readers of the numbers need."""
        return self._gpu.notes

    @property
    def nccl(self) -> str:
        """The sentence that estimates NCCL's memory, which no number contains; may be empty."""
        return sentence(self._gpu.simulation.communicators.values())

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager for the phase ``name``; :attr:`phases` then has its numbers."""
        return self._tracker.window(name)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of all GPUs in the form of ``torch.cuda.memory._snapshot()``."""
        return snapshot([gpu.allocator for gpu in self._gpu.simulation.gpus])

    def gather_peaks(self, world: World) -> None:
        """Send rank 0 of ``world`` the peaks of this rank; rank 0 receives those of all.

        Raises ``MeetingError`` where a rank has ended before.
        """
        # Imported only in a process that torchrun has started.
        from pytest_gpumem.simulated.distributed.exchange import exchange_of

        exchange = exchange_of(world, address_of_process(os.environ))
        rows = exchange.gather("what it took", [self.peak_allocated, self.peak_reserved])
        self._of_ranks = tuple(RankPeaks(*peaks) for peaks in rows)
        if world.rank == 0:
            peaks = {rank: one.peak_allocated for rank, one in enumerate(self._of_ranks)}
            self._gpu.simulation.note(imbalance(peaks))

    def _raise_peaks(self, readings: Readings) -> None:
        reading = readings.get(self._gpu.index)
        if reading is not None:
            self._peak_allocated = max(self._peak_allocated, reading.peak.allocated)
            self._peak_reserved = max(self._peak_reserved, reading.peak.reserved)


@contextmanager
def simulate(
    model: str | GpuModel = "A100-40GB",
    *,
    alloc_conf: str | None = None,
    torch_version: str | None = None,
    cublas_workspace_config: str | None = None,
    real_values: bool = False,
    compile: str = AUTO,
    world_size: int | None = None,
    rank: int = 0,
) -> Iterator[SimulatedRun]:
    """Run the body on a simulated GPU of ``model``; see :class:`SimulatedGPU` for the settings.

    ``"A100-80GB*2"`` is a machine with two of them; a ``GpuModel`` need not be in the catalogue.
    ``compile`` selects the treatment of compiled code: ``"auto"`` follows Inductor and runs eagerly
    code that cannot be followed, ``"always"`` refuses that, ``"eager"`` compiles nothing.
    Growth of the GPU's blocks triggers Python's garbage collector, as in a measured test: see
    :mod:`pytest_gpumem.garbage`.
    With a ``world_size`` the process is ``rank`` of so many, ``torch.distributed`` is initialised,
    and the run is that of the rank's GPU; other ranks do not run. Machines then have as many GPUs
    as ``model`` states, without a star up to eight. Without ``world_size``, a process that torchrun
    has started is simulated as its rank, and at the end rank 0 receives the peaks of all ranks.

    Raises ``ValueError`` for an unknown model, version, setting or rank, and ``RuntimeError`` where
    a rank that torchrun has started has ended before it sent its peaks.
    """
    machine = find_machine(model)
    started = None
    if world_size is None and rank:
        raise WorldError(f"rank={rank} needs world_size=, the number of ranks")
    if world_size is None and (started := world_of_process(os.environ)) and machine.per_machine:
        started = world_of(started.size, started.rank, per_machine=machine.per_machine)
    world = started
    if world_size is not None:
        world = world_of(world_size, rank, per_machine=machine.per_machine)
    gpus = SimulatedGPU.machine(
        model,
        world=world,
        alloc_conf=alloc_conf,
        torch_version=torch_version,
        cublas_workspace_config=cublas_workspace_config,
        real_values=real_values,
        compile=compile,
    )
    own = gpus[gpus[0].simulation.first_index]
    collector = Collector()
    with ExitStack() as inside:
        # If tests run on the dry device, its replaced functions report no device here.
        inside.enter_context(scope.opened(to_children=False))
        inside.enter_context(own.active())
        inside.enter_context(clear_frames_of_imports())
        inside.enter_context(collector.in_charge())
        restart(gpus, collector)
        statistics = CudaStatistics(lambda: workspaces_of(gpus))
        tracker = PhaseTracker(statistics, SimulatedRecorder(own.simulation).positions)
        runs = tuple(SimulatedRun(gpu, statistics, tracker) for gpu in gpus)
        for run in runs:
            run.devices = runs
        with statistics.own_peaks_shown():
            try:
                if world is not None:
                    # torch.distributed is slow to import.
                    from pytest_gpumem.simulated.distributed.process_groups import RankProcessGroups

                    inside.enter_context(RankProcessGroups(world).for_good())
                yield runs[own.index]
                own.simulation.threads.raise_failures()
            finally:
                statistics.read_and_reset_peaks()  # after which the numbers are final
    if started is not None:
        runs[own.index].gather_peaks(started)


def events_hash(gpu: SimulatedGPU) -> int:
    """Return a hash of the events of ``gpu``'s allocator, independent of addresses."""
    events = gpu.allocator.trace.raw(0)
    return hash(tuple((action, size, stream) for action, _, size, stream, _ in events))


def workspaces_of(gpus: Iterable[SimulatedGPU]) -> frozenset[Block]:
    """Return the live workspaces of cuBLAS and cuBLASLt on ``gpus``."""
    return frozenset(
        Block(gpu.index, address, gpu.allocator.block(address))
        for gpu in gpus
        for address in gpu.workspaces.live
    )


def restart(gpus: Sequence[SimulatedGPU], collector: Collector) -> None:
    """Reset state that depends on earlier code: the collector and autograd's numbering."""
    collector.restart()
    running.begin()
    gpus[0].simulation.numbering.begin()
    for gpu in gpus:
        gpu.restart_collector(collector)
