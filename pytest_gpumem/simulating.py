"""``simulate()``: unmodified CUDA code on a machine with no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from pytest_gpumem.allocator.snapshot import snapshot
from pytest_gpumem.attribution.composition import Composition, compositions
from pytest_gpumem.collector import Collector
from pytest_gpumem.device.imports import imports_watched
from pytest_gpumem.dry import scope
from pytest_gpumem.measurement.automatic_phases import AutomaticPhases
from pytest_gpumem.measurement.composition import Account
from pytest_gpumem.measurement.phases import Bytes, PhaseTracker
from pytest_gpumem.measurement.simulated_recorder import SimulatedRecorder
from pytest_gpumem.measurement.statistics import Block, CudaStatistics, Readings
from pytest_gpumem.simulated.common.callsite import running
from pytest_gpumem.simulated.compiled.entry import AUTO
from pytest_gpumem.simulated.distributed.nccl import sentence
from pytest_gpumem.simulated.distributed.worst import imbalance
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, Machine, find_machine
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
    """What one rank took at most, in bytes."""

    peak_allocated: int
    peak_reserved: int


class SimulatedRun:
    """What one ``with simulate(...)`` did to its GPU; readable inside and afterwards.

    Of a machine with several GPUs it is the first one; :attr:`devices` has a run of each.
    """

    def __init__(
        self, gpu: SimulatedGPU, statistics: CudaStatistics, tracker: PhaseTracker
    ) -> None:
        self._gpu = gpu
        self._statistics = statistics
        self._statistics.listeners.append(self._reach)
        self._peak_allocated = 0
        self._peak_reserved = 0
        self._tracker = tracker
        self.devices: tuple[SimulatedRun, ...] = (self,)
        """A run of each GPU of the machine, by index; phases and notes are common to all."""
        self._of_ranks: tuple[RankPeaks, ...] = ()

    @property
    def model(self) -> GpuModel:
        """The GPU's catalogue entry."""
        return self._gpu.model

    @property
    def peak_allocated(self) -> int:
        """Highest bytes in live blocks so far, whatever the code did to torch's own peaks."""
        self._statistics.harvest()
        return self._peak_allocated

    @property
    def peak_reserved(self) -> int:
        """Highest bytes in segments held from the driver so far."""
        self._statistics.harvest()
        return self._peak_reserved

    @property
    def allocated(self) -> int:
        """Bytes in live blocks."""
        return self._gpu.allocator.allocated

    @property
    def reserved(self) -> int:
        """Bytes in segments held from the driver."""
        return self._gpu.allocator.reserved

    @property
    def estimated(self) -> int:
        """Bytes of the peak whose number only a closed library knows: cuDNN's workspaces."""
        return self._gpu.estimated

    @property
    def phases(self) -> Mapping[str, PhaseRecord]:
        """The phases left so far, by name."""
        workspaces = workspaces_of(self._gpu)
        return MappingProxyType(self._tracker.records(self._gpu.index, Bytes(), workspaces))

    @property
    def trace(self) -> Sequence[Any]:
        """Allocator events, in order."""
        return self._gpu.allocator.trace

    @property
    def events(self) -> int:
        """A hash of what the allocator did: of two ranks that take the same it is the same."""
        return hash_of_events(self._gpu)

    @property
    def ranks(self) -> tuple[RankPeaks, ...]:
        """What each rank that torchrun has started took, by rank: known to rank 0 at the end.

        Elsewhere, and of a process that is alone, it is what this one took.
        """
        return self._of_ranks or (RankPeaks(self.peak_allocated, self.peak_reserved),)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that readers of the numbers have to know."""
        return self._gpu.notes

    @property
    def nccl(self) -> str:
        """The sentence that estimates what NCCL takes beside all these numbers; may be empty."""
        return sentence(self._gpu.simulation.communicators.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside; the numbers are in :attr:`phases` afterwards."""
        with self._tracker.window(name):
            yield

    @contextmanager
    def finding_phases(self) -> Iterator[None]:
        """Find forward, backward and step by themselves inside, as in a measured test."""
        with AutomaticPhases(self._tracker).watching():
            yield

    @contextmanager
    def composing(self, name: str, root: str) -> Iterator[dict[str, Composition]]:
        """Find phases inside, and call all of it ``name``.

        What was live at the peak of each is in the value afterwards, by name. Paths of source lines
        are relative to the folder ``root``.
        """
        account = Account(SimulatedRecorder(self._gpu.simulation), root)
        account.begin((), None)
        found: dict[str, Composition] = {}
        with self.phase(name), account.watching(self._tracker):
            yield found
        account.end()
        workspaces = workspaces_of(self._gpu)
        found.update(compositions(account.history(self._gpu.index, self._tracker, workspaces)))

    def snapshot(self) -> dict[str, Any]:
        """The schema of ``torch.cuda.memory._snapshot()``, with every GPU of the machine."""
        return snapshot([gpu.allocator for gpu in self._gpu.simulation.gpus])

    def finish(self) -> None:
        """Take the last reading; afterwards the numbers stand."""
        self._statistics.harvest()

    def tell(self, world: World) -> None:
        """Tell rank 0 of ``world`` what this one took, and be told as rank 0 what all took.

        Raises ``MeetingError`` where a rank has ended before.
        """
        # What only a process of torchrun's has to import.
        from pytest_gpumem.simulated.distributed.meeting import meeting_of

        meeting = meeting_of(world, address_of_process(os.environ))
        told = meeting.gather("what it took", [self.peak_allocated, self.peak_reserved])
        self._of_ranks = tuple(RankPeaks(*peaks) for peaks in told)
        if world.rank == 0:
            peaks = {rank: one.peak_allocated for rank, one in enumerate(self._of_ranks)}
            self._gpu.simulation.note(imbalance(peaks))

    def _reach(self, readings: Readings) -> None:
        reading = readings.get(self._gpu.index)
        if reading is not None:
            self._peak_allocated = max(self._peak_allocated, reading.peak_allocated)
            self._peak_reserved = max(self._peak_reserved, reading.peak_reserved)


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
    ``compile`` says what becomes of compiled code: ``"auto"`` follows Inductor and runs eagerly
    what cannot be followed, ``"always"`` refuses that, ``"eager"`` compiles nothing.
    Python's garbage collector runs at moments that the GPU decides, as in a measured test: see
    :mod:`pytest_gpumem.collector`.
    With a ``world_size`` the process is ``rank`` of so many, ``torch.distributed`` is initialised,
    and the run is that of the rank's own GPU; the others are not there. Such machines have as many
    GPUs as ``model`` says, without a star up to eight. Without one, a process that torchrun has
    started is the rank that it was started as, alone all the same; at the end rank 0 is told what
    each of them took.

    Raises ``ValueError`` for an unknown model, version, setting or rank, and ``RuntimeError`` where
    a rank that torchrun has started has ended before it could say what it took.
    """
    machine = find_machine(model)
    started = _started(machine) if world_size is None and not rank else None
    world = started or _world(machine, world_size, rank)
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
        # Where tests run on the dry device, its functions would say that there is no device.
        inside.enter_context(scope.opened())
        inside.enter_context(own.active())
        inside.enter_context(imports_watched())
        inside.enter_context(collector.in_charge())
        collector.restart()
        running.begin()
        own.simulation.numbering.begin()
        for gpu in gpus:
            gpu.restart_collector(collector)
        statistics = CudaStatistics()
        tracker = PhaseTracker(statistics, SimulatedRecorder(own.simulation).positions)
        runs = tuple(SimulatedRun(gpu, statistics, tracker) for gpu in gpus)
        for run in runs:
            run.devices = runs
        with statistics.screened():
            try:
                if world is not None:
                    inside.enter_context(_joined(world))
                yield runs[own.index]
                own.simulation.threads.raise_failures()
            finally:
                runs[0].finish()
    if started is not None:
        runs[own.index].tell(started)


def _started(machine: Machine) -> World | None:
    world = world_of_process(os.environ)
    if world is None or machine.per_machine is None:
        return world
    return world_of(world.size, world.rank, per_machine=machine.per_machine)


def _world(machine: Machine, size: int | None, rank: int) -> World | None:
    if size is None:
        if rank:
            raise WorldError(f"rank={rank} is one of how many? write world_size=, too")
        return None
    return world_of(size, rank, per_machine=machine.per_machine)


def _joined(world: World) -> AbstractContextManager[None]:
    # Most simulations are of one process, and torch.distributed takes a while to import.
    from pytest_gpumem.simulated.distributed.process_groups import Membership

    return Membership(world).for_good()


def hash_of_events(gpu: SimulatedGPU) -> int:
    """Return a hash of what the allocator of ``gpu`` did, wherever its blocks lie."""
    events = gpu.allocator.trace.raw(0)
    return hash(tuple((action, size, stream) for action, _, size, stream, _ in events))


def workspaces_of(gpu: SimulatedGPU) -> frozenset[Block]:
    """Return the live workspaces of ``gpu``."""
    return frozenset(
        Block(gpu.index, address, gpu.allocator.block(address)) for address in gpu.workspaces.live
    )
