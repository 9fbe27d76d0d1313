"""A simulated CUDA device, as the plugin uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from pytest_gpumem.device.environment import Environment
from pytest_gpumem.measurement.record import Measurement
from pytest_gpumem.simulated.device import SetupLog, SimulatedGPU


class SimulatedDevice:
    """A simulated GPU; one of a model serves all tests of the process, as a real one would."""

    def __init__(self, model: str) -> None:
        self._gpu = SimulatedGPU(model)
        self._logs: dict[object, SetupLog] = {}
        self._stray = 0

    @property
    def index(self) -> int:
        """As in ``cuda:0``."""
        return self._gpu.index

    @property
    def environment(self) -> Environment:
        """What its numbers depend on."""
        return self._gpu.environment

    @property
    def total_memory(self) -> int:
        """Bytes, as the catalogue says."""
        return self._gpu.model.total_memory

    def active(self) -> AbstractContextManager[object]:
        """Serve ``cuda`` from this device inside."""
        return self._gpu.active()

    def begin_test(self, shared: Iterable[object]) -> None:
        """Begin with an empty device on which only the ``shared`` fixtures have been set up.

        A leak, or a traceback that keeps tensors of a failed test, then changes no number.
        """
        self._gpu.simulation.notes.clear()
        self._gpu.allocator.trace.clear()
        logs = [self._logs[one] for one in shared if one in self._logs]
        if logs or self._gpu.allocator.reserved:
            self._gpu.renew(logs)
        self._stray = self._gpu.left_behind

    @contextmanager
    def setting_up(self, fixture: object) -> Iterator[None]:
        """Log what the set-up of ``fixture``, which goes on inside, allocates."""
        with self._gpu.logging() as log:
            yield
        self._logs[fixture] = log

    def forget(self, fixture: object) -> None:
        """Drop the log of a fixture that has been torn down."""
        self._logs.pop(fixture, None)

    def complete(self, measurement: Measurement) -> Measurement:
        """Return ``measurement`` marked as simulated, with the sentences that go with it."""
        return replace(
            measurement,
            simulated=True,
            stray=measurement.stray + self._stray,
            notes=measurement.notes + self._gpu.notes,
        )

    def nvml(self) -> None:
        """Return nothing: there is no device to read."""
