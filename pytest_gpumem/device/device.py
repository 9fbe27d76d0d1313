"""What the rest of the plugin asks of a device; imported for type checking only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pytest_gpumem.device.environment import Environment
from pytest_gpumem.measurement.record import Measurement
from pytest_gpumem.measurement.recorder import Recorder


class Device(Protocol):
    """A device that tests are measured on, real or simulated."""

    @property
    def index(self) -> int:
        """As in ``cuda:0``."""

    @property
    def environment(self) -> Environment:
        """What its numbers depend on; asking a real device initialises CUDA."""

    @property
    def total_memory(self) -> int:
        """Bytes; asking a real device initialises CUDA."""

    @property
    def recorder(self) -> Recorder | None:
        """What remembers every block, ``None`` where nothing is recorded."""

    def active(self) -> AbstractContextManager[object]:
        """Serve ``cuda`` from this device inside."""

    def begin_test(self, shared: Iterable[object]) -> None:
        """Forget earlier tests, but for the ``shared`` fixtures that they have set up."""

    def begin_unmeasured(self) -> None:
        """Forget what was remembered of earlier tests, and leave the memory as it is."""

    def end_body(self) -> None:
        """Raise what threads that a test's body has left to themselves could not run."""

    def setting_up(self, fixture: object) -> AbstractContextManager[object]:
        """Let ``fixture``, which tests share, be set up inside."""

    def forget(self, fixture: object) -> None:
        """Drop what is known of a fixture that has been torn down."""

    def complete(self, measurement: Measurement) -> Measurement:
        """Return ``measurement`` with what only this kind of device knows."""

    def nvml(self) -> Mapping[str, Any] | None:
        """Return a device-level reading as builtin types, ``None`` where there is no device."""
