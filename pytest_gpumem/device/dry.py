"""The dry device: torch's own CUDA code over a runtime whose kernels do nothing.

It is measured as a GPU is. What differs is said here: numbers repeat byte for byte, so they are
named as exact ones, and there is neither a driver nor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING

from pytest_gpumem.device.cuda import CudaDevice
from pytest_gpumem.device.environment import Environment
from pytest_gpumem.dry import scope, workspaces
from pytest_gpumem.dry.load import begin_placing_anew
from pytest_gpumem.measurement.record import Measurement
from pytest_gpumem.simulated.distributed.world import Seat, world_of
from pytest_gpumem.simulated.gpu.catalogue import find_machine

if TYPE_CHECKING:
    from pytest_gpumem.device.device import Renewed
    from pytest_gpumem.dry.ranks import Membership


class DryDevice(CudaDevice):
    """The first of the process's dry GPUs: of the model ``name``, or of several, ``"H100*2"``.

    With a ``seat`` the process is one rank of several. As many of them share a machine as there
    are ``gpus``, and the GPU of the rank is the tests' own. ``index`` is that of a rank that
    torchrun has started.
    """

    context = 0

    def __init__(
        self, name: str, seat: Seat | None = None, *, gpus: int = 1, index: int | None = None
    ) -> None:
        super().__init__(index)
        machine = find_machine(name)
        self._name = machine.model.name
        self._seat = seat
        self._membership: Membership | None = None
        if seat is not None:
            # torch.distributed takes a while to import.
            from pytest_gpumem.dry.ranks import Membership

            world = world_of(seat.size, seat.rank, per_machine=gcd(gpus, seat.size))
            self.index = world.local_rank
            self._membership = Membership(world)

    @cached_property
    def _environment(self) -> Environment:
        ranks = "" if self._seat is None else self._seat.name
        return replace(
            super()._environment, gpu=self._name, driver=None, partition="", ranks=ranks, dry=True
        )

    @property
    def events(self) -> int:
        """A hash of what the tests' own allocator did in the present test."""
        return workspaces.events(self.index)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Show the process its devices inside; a rank of several has its groups."""
        with scope.opened(), super().active(), ExitStack() as inside:
            if self._membership is not None:
                inside.enter_context(self._membership.taken())
            yield

    def close(self) -> None:
        """Leave the process groups of a rank."""
        if self._membership is not None:
            with scope.opened():
                self._membership.close()

    def begin_test(self, name: str, fixtures: Sequence[object], renewed: Renewed) -> None:
        """Place segments as in a new process, beside those that earlier tests have left."""
        super().begin_test(name, fixtures, renewed)
        begin_placing_anew()
        workspaces.forget()

    def unmeasured(self) -> AbstractContextManager[None]:
        """Let no peak inside have anything to say of the test's estimates."""
        return workspaces.unmeasured()

    def complete(self, measurement: Measurement) -> Measurement:
        """Return ``measurement`` marked as dry, with what it has of libraries' workspaces."""
        known = super().complete(measurement)
        return replace(known, dry=True, notes=known.notes + workspaces.notes(self.index))
