"""The dry device: torch's own CUDA code over a runtime whose kernels do nothing.

It is measured like a GPU. This class contains the differences: numbers repeat byte for byte, so
they are marked as exact, and there is neither a driver nor timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.device.cuda import CudaDevice, check_allocator
from pytest_gpumem.device.device import ComputingDevice, is_set_up, is_shared
from pytest_gpumem.device.random_numbers import seeded_generators
from pytest_gpumem.dry import blocks, compiling, scope, workspaces
from pytest_gpumem.dry.load import restart_placing
from pytest_gpumem.dry.placing import Fixtures
from pytest_gpumem.dry.values.follower import Follower
from pytest_gpumem.garbage import GROWTH, Collector
from pytest_gpumem.measurement.fixtures import Renewed
from pytest_gpumem.simulated.gpu.catalogue import find_machine
from pytest_gpumem.simulated.machine.values.work import Work
from pytest_gpumem.simulated.surface import compilers
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.world import RequestedRank, world_of

if TYPE_CHECKING:
    from pytest_gpumem.dry.ranks import DryRankProcessGroups


class DryDevice(CudaDevice, ComputingDevice):
    """A dry GPU, by default the process's first; ``name`` is a model or several, ``"H100*2"``.

    ``computed`` selects the values that the CPU computes. With ``requested`` the process is one
    rank of several, with ``gpus`` ranks in a machine, and is measured on its own GPU. ``index`` is
    the GPU of a rank that torchrun has started. With ``runs_again`` (a test that fails by an
    unknown value is repeated), the first run may use placeholders for unknown integers.
    """

    context_bytes = 0
    compile_context = staticmethod(compiling.separate_pool)
    """A separate pool, because compilers allocate less if their results are in a cache on disk."""

    def __init__(
        self,
        name: str,
        computed: ValueLevel = ValueLevel.AT_FIRST,
        *,
        requested: RequestedRank | None = None,
        gpus: int = 1,
        index: int | None = None,
        runs_again: bool = True,
    ) -> None:
        check_allocator()
        super().__init__(index)
        machine = find_machine(name)
        self._name = machine.model.name
        self._computed = computed
        self._blocks = blocks.Blocks()
        self._space = self._leftover = blocks.LeftoverBlocks(self._blocks)
        self._collector = Collector()
        self._follower = Follower(
            follows=computed > ValueLevel.AT_FIRST,
            everything=computed is ValueLevel.ALL,
            makes_up_integers=runs_again,
        )
        self._fixtures = Fixtures(self._blocks, self._leftover, self._follower.values.moving)
        self._requested = requested
        self._membership: DryRankProcessGroups | None = None
        if requested is not None:
            # torch.distributed is slow to import.
            from pytest_gpumem.dry.ranks import DryRankProcessGroups

            world = world_of(requested.size, requested.rank, per_machine=gcd(gpus, requested.size))
            self.index = world.local_rank
            self._membership = DryRankProcessGroups(world)

    @cached_property
    def _environment(self) -> Environment:
        ranks = "" if self._requested is None else self._requested.name
        return replace(
            super()._environment, gpu=self._name, driver=None, partition="", ranks=ranks, dry=True
        )

    @property
    def events_hash(self) -> int:
        return workspaces.events_hash(self.index)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the dry devices visible inside; a rank also has its process groups.

        Only compiled code imports torch's compilers here, and no optimizer does.
        """
        with (
            scope.opened(),
            compilers.deferred(nullcontext, nullcontext),
            super().active(),
            self._follower.active(),
            blocks.passes_dropped(),
            compiling.skip_tuning(self._follower.following),
            self._membership.taken() if self._membership else nullcontext(),
        ):
            yield

    def close(self) -> None:
        """Leave the process groups of a rank."""
        if self._membership is not None:
            with scope.opened():
                self._membership.close()

    def begin_test(self, name: str, fixtures: Sequence[object], renewed: Renewed) -> None:
        """Place segments as in a new process, except for those left by earlier tests."""
        self._notes = self._threads.notes
        self._follower.begin()
        workspaces.renew_dropout_states()
        restart_placing()
        self._fixtures.begin(fixtures, is_set_up, renewed)
        workspaces.forget()

    def begin_unmeasured(self) -> None:
        """Drop the records of earlier tests' reads; the values of their tensors stay."""
        self._follower.begin()

    def begin_body(self) -> None:
        """Place fixtures that come after one that the test did not use."""
        self._fixtures.begin_body()

    def end_body(self) -> None:
        """Wait until threads of autograd and NCCL have dropped the body's tensors."""
        blocks.wait_for_threads()
        if self._membership is not None:
            self._membership.end_body()

    def unmeasured(self) -> AbstractContextManager[None]:
        return workspaces.unmeasured()

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Run the test ``name`` inside; only growth of the GPUs' blocks triggers the collector."""
        with (
            super().measuring(name),
            seeded_generators(),
            self._collector.in_charge(),
            self._blocks.growing(GROWTH, self._collector.grown),
        ):
            try:
                yield
            finally:
                self._leftover.release()

    def restart_collector(self) -> None:
        """Reset state that depends on earlier code: the collector and autograd's numbering."""
        self._collector.restart()
        blocks.restart_numbering()
        self._blocks.restart_count()

    @contextmanager
    def setting_up(self, fixture: object) -> Iterator[None]:
        """Attribute the blocks that are allocated inside to ``fixture``."""
        with (
            self._counting_threads(fixture),
            self._fixtures.setting_up(fixture),
            seeded_generators() if is_shared(fixture) else nullcontext(),
        ):
            yield

    def forget(self, fixture: object) -> None:
        self._fixtures.forget(fixture)

    def complete(self, measurement: Measurement) -> Measurement:
        completed = super().complete(measurement)
        return replace(
            completed,
            dry=True,
            notes=(*completed.notes, *workspaces.notes(self.index), *self._follower.notes.notes),
        )

    @property
    def next_level(self) -> ValueLevel | None:
        return None if self._computed is ValueLevel.ALL else ValueLevel(self._computed + 1)

    @property
    def decided_by(self) -> str | None:
        return self._follower.reads.decided_by

    @property
    def used_placeholder(self) -> bool:
        return self._follower.used_placeholder

    @property
    def work(self) -> Work:
        return self._follower.values.work

    def note(self, sentence: str) -> None:
        self._follower.notes.note(sentence)
