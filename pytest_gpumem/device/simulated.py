"""A simulated CUDA device, as the plugin uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.device.device import ComputingDevice, is_set_up, is_shared
from pytest_gpumem.device.quota import failed_allocations, inherited
from pytest_gpumem.device.random_numbers import seeded_generators
from pytest_gpumem.dry import scope
from pytest_gpumem.garbage import Collector, clear_frames_of_imports
from pytest_gpumem.measurement.fixtures import Renewed
from pytest_gpumem.measurement.recorded import SimulatedRecorder
from pytest_gpumem.measurement.statistics import Block, Bytes
from pytest_gpumem.sharing.admission import FailedAllocation
from pytest_gpumem.sharing.devices import CandidateDevice, SharedSimulatedDevice, take_place
from pytest_gpumem.simulated.distributed.nccl import sentence
from pytest_gpumem.simulated.gpu.catalogue import GpuModel, Machine, find_machine
from pytest_gpumem.simulated.machine.machine import SetupLog
from pytest_gpumem.simulated.machine.values.work import Work
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.simulating import events_hash, restart, workspaces_of
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.world import RequestedRank, world_of

if TYPE_CHECKING:
    from pytest_gpumem.simulated.distributed.process_groups import RankProcessGroups


class SimulatedDevice(ComputingDevice):
    """A simulated machine, used by all tests of the process that request it.

    ``name`` is a model or several GPUs of it, ``"A100-80GB*2"``; tests are measured on the first.
    With ``real_values`` the CPU computes all values, so that tests can read them. With
    ``stand_ins`` tests may import flash-attn where it is not installed. ``compile`` selects the
    treatment of compiled code, as in ``simulate``. With ``requested`` the process is one rank of
    several, measured on its own GPU. With ``runs_again`` (a test that fails by an unknown value is
    repeated), the first run may use placeholders for unknown integers.
    """

    def __init__(
        self,
        name: str | GpuModel | Machine,
        *,
        real_values: bool = False,
        stand_ins: bool = True,
        compile: str = "auto",
        requested: RequestedRank | None = None,
        runs_again: bool = True,
    ) -> None:
        machine = find_machine(name)
        self._requested = requested
        self._membership: RankProcessGroups | None = None
        world = None
        if requested is not None:
            # torch.distributed is slow to import.
            from pytest_gpumem.simulated.distributed.process_groups import RankProcessGroups

            per_machine = machine.per_machine or requested.per_machine
            world = world_of(requested.size, requested.rank, per_machine=per_machine)
            self._membership = RankProcessGroups(world)
        self._name = machine.name
        self._gpus = SimulatedGPU.machine(
            machine, world=world, real_values=real_values, stand_ins=stand_ins, compile=compile
        )
        self._simulation = self._gpus[0].simulation
        self._simulation.runs_again = runs_again
        self.index = self._simulation.first_index
        self._own = self._gpus[self.index]
        self._set_up: dict[object, _SetUp] = {}
        self._expected: list[object] = []
        """The fixtures of the current test whose memory is not allocated yet, in order."""
        self._present: set[object] = set()
        """The fixtures whose memory is allocated."""
        self._renewed: Renewed = lambda *_: None
        self._stray: dict[str, int] = {}
        self._shared: dict[str, SimulatedGPU] = {}
        """The GPUs whose memory other processes share, by name."""
        self._collector = Collector()

    @property
    def environment(self) -> Environment:
        own = self._own.environment
        if self._requested is not None:
            own = replace(own, gpu=self._name, ranks=self._requested.name)
        return own.with_extra(self.extra)

    @property
    def total_memory(self) -> int:
        return self._own.model.total_memory

    @property
    def events_hash(self) -> int:
        return events_hash(self._own)

    @property
    def recorder(self) -> SimulatedRecorder:
        return SimulatedRecorder(self._simulation)

    def workspaces(self) -> frozenset[Block]:
        return workspaces_of(self._gpus)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make ``cuda`` this device inside; abandon captures that are left open."""
        # If other tests run on the dry device, its replaced functions report no device here.
        with (
            scope.opened(to_children=False),
            self._simulation.active(),
            self._membership.taken() if self._membership else nullcontext(),
        ):
            try:
                yield
            finally:
                self._simulation.abandon_captures()

    def begin_test(self, name: str, fixtures: Sequence[object], renewed: Renewed) -> None:
        """Begin with an empty device on which only ``fixtures`` are set up, in this order.

        A live fixture is placed after the preceding ones, some of which the test may yet set up.

        So a leak, a traceback that keeps tensors of a failed test, or another test's choice of the
        current device changes no number.
        """
        self._forget()
        self._simulation.threads.begin(name)
        self._simulation.compilation.forget()
        # A fixture that was set up without a device holds no memory on it.
        self._expected = [one for one in fixtures if one in self._set_up or not is_set_up(one)]
        self._present.clear()
        self._renewed = renewed
        earlier = [self._set_up[one] for one in fixtures if one in self._set_up]
        self._simulation.streams.reset(keep=any(each.has_streams for each in earlier))
        self._simulation.begin(has_real_meta=any(each.has_real_meta for each in earlier))
        chosen = [each.current_index for each in earlier if each.current_index is not None]
        self._simulation.current_index = chosen[-1] if chosen else self.index
        for gpu in self._gpus:
            gpu.allocator.trace.clear()
            gpu.estimates.clear()
            # Also if nothing is held: a test may have changed settings or the memory fraction.
            gpu.renew()
            for each in earlier:
                gpu.workspaces.settings.chosen.update(each.workspace_sizes)
        self._repeat()
        for gpu in self._gpus:
            gpu.allocator.trace.clear()
            gpu.allocator.reset_peak_stats()
        self._stray = {str(gpu.torch_device): gpu.left_behind for gpu in self._gpus}

    def not_in_memory(self, fixtures: Iterable[object]) -> Sequence[object]:
        return [one for one in fixtures if one in self._set_up and one not in self._present]

    def repeat_set_up(self, fixture: object) -> None:
        self._present.add(fixture)
        logs = self._set_up[fixture].logs
        taken = [gpu.repeat(log) for gpu, log in zip(self._gpus, logs, strict=True)]
        self._renewed(
            fixture,
            {i: Bytes(one.allocated, one.reserved) for i, one in enumerate(taken)},
            {i: Bytes(one.peak_allocated, one.peak_reserved) for i, one in enumerate(taken)},
        )

    def begin_body(self) -> None:
        """Repeat the set-up of fixtures that come after one that the test did not use."""
        self._expected = [one for one in self._expected if one in self._set_up]
        self._repeat()

    def _repeat(self) -> None:
        """Repeat the next set-ups, up to the first fixture that has no log yet."""
        while self._expected and self._expected[0] in self._set_up:
            self.repeat_set_up(self._expected.pop(0))

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Run the test ``name`` inside; only growth of the GPUs' blocks triggers the collector."""
        with (
            self._simulation.threads.owned_by(name),
            clear_frames_of_imports(),
            seeded_generators(),
            self._collector.in_charge(),
        ):
            yield

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        with ExitStack() as paused:
            for gpu in self._gpus:
                paused.enter_context(gpu.estimates.unmeasured())
            yield

    def restart_collector(self) -> None:
        restart(self._gpus, self._collector)

    def begin_unmeasured(self) -> None:
        """Forget the events of earlier tests, which a long run would keep and search.

        A memory history that the code under test records stays, as on a GPU.
        """
        self._forget()
        for gpu in self._gpus:
            trace = gpu.allocator.trace
            if trace.recording is None or not trace.recording.on:
                trace.clear()

    def _forget(self) -> None:
        self._simulation.notes.clear()
        self._simulation.threads.forget_failures()
        self._simulation.forget_reads()

    def end_body(self) -> None:
        """Raise the failure of a thread that was not joined: a :class:`SimulationError`."""
        self._simulation.threads.raise_failures()

    @contextmanager
    def setting_up(self, fixture: object) -> Iterator[None]:
        """Log the allocations of the set-up of ``fixture``, which runs inside."""
        before = self._simulation.current_index
        sizes = self._own.workspaces.settings.chosen
        earlier = dict(sizes)
        with ExitStack() as logging:
            if is_shared(fixture):
                logging.enter_context(self._simulation.threads.owned_by(None))
                logging.enter_context(seeded_generators())
            logs = [logging.enter_context(gpu.logging()) for gpu in self._gpus]
            yield
        after = self._simulation.current_index
        chosen = {} if sizes == earlier else dict(sizes)
        self._set_up[fixture] = _SetUp(
            logs,
            after if after != before else None,
            chosen,
            self._simulation.has_real_meta,
            self._simulation.streams.are_there,
        )
        self._present.add(fixture)
        if fixture in self._expected:
            self._expected.remove(fixture)
        if not self._own.open_logs:
            self._repeat()

    def forget(self, fixture: object) -> None:
        self._set_up.pop(fixture, None)

    def complete(self, measurement: Measurement) -> Measurement:
        return replace(
            measurement,
            simulated=True,
            stray=measurement.stray + self._stray.get(measurement.device, 0),
            notes=measurement.notes + self._own.notes,
        )

    @property
    def has_values(self) -> bool:
        """Whether every value is computed."""
        return self._simulation.values.everything

    @property
    def next_level(self) -> ValueLevel | None:
        return None if self.has_values else ValueLevel.ALL

    @property
    def used_placeholder(self) -> bool:
        return self._simulation.assumed or bool(self._simulation.placeholder_reads)

    @property
    def work(self) -> Work:
        return self._simulation.values.work

    @property
    def nccl(self) -> str:
        """The sentence that estimates NCCL's memory, which no number contains; may be empty."""
        return sentence(self._simulation.communicators.values())

    def note(self, sentence: str) -> None:
        self._simulation.note(sentence)

    def share(self, folder: Path) -> Sequence[SharedSimulatedDevice]:
        """Share devices of this name with other processes that simulate them.

        If the machine has several, this process's ``cuda:0`` is the least loaded one.
        """
        model, count = self._own.model, len(self._gpus)
        devices = [
            SharedSimulatedDevice(
                folder, f"simulated {model.name} cuda:{index}", model.total_memory
            )
            for index in range(count)
        ]
        candidates = [
            CandidateDevice(device.name, device.capacity, device.taken()) for device in devices
        ]
        first = take_place(folder, candidates)
        shared = [devices[(first + index) % count] for index in range(count)]
        for gpu, device in zip(self._gpus, shared, strict=True):
            gpu.share(device)
            self._shared[device.name] = gpu
        return shared

    def held(self, name: str) -> tuple[int, int]:
        """Return the bytes of a context, 0, and the reserved bytes."""
        return 0, self._shared[name].allocator.reserved

    @contextmanager
    def limited(self, size: int) -> Iterator[None]:
        """Limit the first GPU's allocator to reserving ``size`` bytes inside."""
        gpu = self._own
        if size >= gpu.model.total_memory:
            yield
            return
        # The allocator rounds the product down to whole bytes.
        fraction = (size + 0.5) / gpu.model.total_memory
        gpu.allocator.set_memory_fraction(fraction)
        try:
            with inherited(fraction):
                yield
        finally:
            gpu.allocator.set_memory_fraction(1.0)

    def failed_allocations(self) -> AbstractContextManager[Sequence[FailedAllocation]]:
        """Return the list that collects the refusals of the first GPU's allocator inside."""
        gpu = self._own

        def note(index: int, asked: int, free: int) -> FailedAllocation:
            return FailedAllocation(asked, gpu.allocator.reserved, free, gpu.model.total_memory)

        return failed_allocations(gpu.allocator.observers, note)

    def empty_cache(self) -> None:
        for gpu in self._gpus:
            gpu.workspaces.clear()
            gpu.allocator.empty_cache()


class _SetUp(NamedTuple):
    """The effect of a fixture's set-up on the machine."""

    logs: list[SetupLog]
    current_index: int | None
    """The device that it made the current one, ``None`` if it did not change it."""
    workspace_sizes: dict[str, int]
    """Bytes by library, where it set a workspace's size; see ``WorkspaceSettings.chosen``."""
    has_real_meta: bool
    """Whether meta tensors of the user existed at its end."""
    has_streams: bool
    """Whether streams of the user existed at its end."""
