"""Which device a test runs on: options and marker -> one active device."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.device.device import Device
    from pytest_gpumem.device.environment import Environment
    from pytest_gpumem.marker import Expectation
    from pytest_gpumem.measurement.record import Measurement
    from pytest_gpumem.options import DeviceChoice
    from pytest_gpumem.simulated.device import SetupLog, SimulatedGPU


class DeviceError(ValueError):
    """The device asked for cannot be had; the message is one sentence for the user."""


class SimulatedDevice:
    """A simulated GPU; one of a model serves all tests of the process, as a real one would."""

    def __init__(self, model: str) -> None:
        from pytest_gpumem.simulated.device import SimulatedGPU

        self._gpu: SimulatedGPU = SimulatedGPU(model)
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


class DeviceSelector:
    """Decides on first use, and once: torch is imported here and not before."""

    def __init__(self, choice: DeviceChoice) -> None:
        self._choice = choice
        self._simulated: dict[str, Device] = {}
        self._real: Device | None = None
        self._decided = False

    @property
    def off(self) -> bool:
        """Whether nothing is measured."""
        return self._choice.kind == "off"

    @property
    def description(self) -> str:
        """What is known without torch of where tests will be measured."""
        models = ", ".join(f"simulated {model}" for model in self._choice.models)
        if self._choice.kind == "auto":
            return f"a CUDA device if torch sees one, else {models}"
        if self._choice.kind == "cuda":
            return "cuda" if self._choice.index is None else f"cuda:{self._choice.index}"
        return models or "off, nothing is measured"

    def models(self, expectation: Expectation) -> Sequence[str]:
        """Return the GPU models that a test is to be simulated on, one by one.

        Known without torch, so that collecting does not import it; where a GPU is found later, the
        first of them stands for it.
        """
        return expectation.gpu or (self._choice.models if self._choice.kind == "sim" else ())

    def select(self, model: str | None) -> Device:
        """Return the real device, or a simulated one of ``model`` (``None``: as the options say).

        Raises :class:`DeviceError` where the options ask for a CUDA device that is not there.
        """
        return self.real() or self._simulate(model or self._choice.models[0])

    def real(self) -> Device | None:
        """Return the real device to measure on, ``None`` where tests are simulated."""
        if not self._decided:
            self._real = self._find_real()
            self._decided = True
        return self._real

    def forget(self, fixture: object) -> None:
        """Drop what any device knows of a fixture that has been torn down."""
        for device in self._simulated.values():
            device.forget(fixture)

    def _find_real(self) -> Device | None:
        if self._choice.kind not in ("auto", "cuda"):
            return None
        from pytest_gpumem.device.cuda import find_device

        return find_device(self._choice.index, required=self._choice.kind == "cuda")

    def _simulate(self, model: str) -> Device:
        if model not in self._simulated:
            self._simulated[model] = SimulatedDevice(model)
        return self._simulated[model]
