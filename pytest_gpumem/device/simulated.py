"""A simulated CUDA device, as the plugin uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from pytest_gpumem.device.environment import Environment
from pytest_gpumem.measurement.record import Measurement
from pytest_gpumem.measurement.recorder import Recorder
from pytest_gpumem.simulated.device import SetupLog, SimulatedGPU
from pytest_gpumem.simulated.gpus import Machine
from pytest_gpumem.simulated.recorder import SimulatedRecorder


class SimulatedDevice:
    """The simulated machine of one name; it serves all tests of the process, as a real one would.

    ``name`` is a model or several of it, ``"A100-80GB*2"``; the first GPU is the tests' own. With
    ``real_values`` the CPU computes what is simulated, so that tests can read every value.
    """

    def __init__(self, name: str | Machine, *, real_values: bool = False) -> None:
        self._gpus = SimulatedGPU.machine(name, real_values=real_values)
        self._simulation = self._gpus[0].simulation
        self._set_up: dict[object, _SetUp] = {}
        self._stray: dict[str, int] = {}

    @property
    def index(self) -> int:
        """As in ``cuda:0``."""
        return self._gpus[0].index

    @property
    def environment(self) -> Environment:
        """What its numbers depend on."""
        return self._gpus[0].environment

    @property
    def total_memory(self) -> int:
        """Bytes of one GPU, as the catalogue says."""
        return self._gpus[0].model.total_memory

    @property
    def recorder(self) -> Recorder:
        """What remembers every block: a simulated device always does."""
        return SimulatedRecorder(self._simulation)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Serve ``cuda`` from this device inside; captures that are left open end with it."""
        with self._simulation.active():
            try:
                yield
            finally:
                self._simulation.streams.abandon_captures()

    def begin_test(self, shared: Iterable[object]) -> None:
        """Begin with an empty device on which only the ``shared`` fixtures have been set up.

        A leak, or a traceback that keeps tensors of a failed test, then changes no number; nor does
        the device that another test made the current one.
        """
        self._forget()
        earlier = [self._set_up[one] for one in shared if one in self._set_up]
        self._simulation.streams.reset(keep=bool(earlier))
        chosen = [each.current_index for each in earlier if each.current_index is not None]
        self._simulation.current_index = chosen[-1] if chosen else 0
        for position, gpu in enumerate(self._gpus):
            gpu.allocator.trace.clear()
            gpu.estimates.clear()
            # Also where nothing is held: a test may have changed settings, or the memory fraction.
            gpu.renew([each.logs[position] for each in earlier])
        self._stray = {str(gpu.torch_device): gpu.left_behind for gpu in self._gpus}

    def begin_unmeasured(self) -> None:
        """Forget what happened in earlier tests: a long run would hold and search all of it.

        What the code under test has asked the allocator to record stays, as on a GPU.
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
        """Raise what a thread that nobody joined could not run: :class:`SimulationError`."""
        self._simulation.threads.raise_failures()

    @contextmanager
    def setting_up(self, fixture: object) -> Iterator[None]:
        """Log what the set-up of ``fixture``, which goes on inside, allocates."""
        before = self._simulation.current_index
        with ExitStack() as logging:
            logs = [logging.enter_context(gpu.logging()) for gpu in self._gpus]
            yield
        after = self._simulation.current_index
        self._set_up[fixture] = _SetUp(logs, after if after != before else None)

    def forget(self, fixture: object) -> None:
        """Drop the log of a fixture that has been torn down."""
        self._set_up.pop(fixture, None)

    def complete(self, measurement: Measurement) -> Measurement:
        """Return ``measurement`` marked as simulated, with the sentences that go with it."""
        return replace(
            measurement,
            simulated=True,
            stray=measurement.stray + self._stray.get(measurement.device, 0),
            notes=measurement.notes + self._gpus[0].notes,
        )

    @property
    def has_values(self) -> bool:
        """Whether every value is computed."""
        return self._simulation.values.everything

    @property
    def made_up(self) -> bool:
        """Whether the present test has read a value that nobody computed."""
        return bool(self._simulation.neutral_reads)

    def note(self, sentence: str) -> None:
        """Say ``sentence`` with the numbers of the present test."""
        self._simulation.note(sentence)

    def nvml(self) -> None:
        """Return nothing: there is no device to read."""


@dataclass(frozen=True)
class _SetUp:
    """What the set-up of a fixture did to the machine."""

    logs: list[SetupLog]
    """One of each GPU."""
    current_index: int | None
    """The device that it made the current one."""
