"""The dry device: torch's own CUDA code over a runtime whose kernels do nothing.

It is measured as a GPU is. What differs is said here: numbers repeat byte for byte, so they are
named as exact ones, and there is neither a driver nor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_gpumem.device.cuda import CudaDevice
from pytest_gpumem.device.environment import Environment
from pytest_gpumem.dry import scope, workspaces
from pytest_gpumem.dry.load import begin_placing_anew
from pytest_gpumem.measurement.record import Measurement
from pytest_gpumem.simulated.gpu.catalogue import find_machine

if TYPE_CHECKING:
    from pytest_gpumem.device.device import Renewed


class DryDevice(CudaDevice):
    """The first of the process's dry GPUs; ``name`` is a model or several of it, ``"H100*2"``."""

    def __init__(self, name: str) -> None:
        super().__init__(None)
        self._name = find_machine(name).model.name

    @cached_property
    def _environment(self) -> Environment:
        return replace(super()._environment, gpu=self._name, driver=None, partition="", dry=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Show the process its devices inside."""
        with scope.opened(), super().active():
            yield

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

    def nvml(self) -> Mapping[str, object] | None:  # type: ignore[override]
        """Return nothing: there is no driver to read."""
        return None
