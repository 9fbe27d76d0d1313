"""What the rest of the plugin asks of a device; imported for type checking only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from pytest_gpumem.measurement.phases import Bytes
from pytest_gpumem.measurement.recorder import Recorder
from pytest_gpumem.measurement.statistics import Block
from pytest_gpumem.sharing.gate import HostDevice
from pytest_gpumem.sharing.refusal import Refusal
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.measurement import Measurement

Renewed = Callable[[object, Mapping[int, Bytes], Mapping[int, Bytes]], None]
"""(fixture, by device: what its set-up holds, and how far it went above its start)."""


class Device(Protocol):
    """A device that tests are measured on, real or simulated."""

    @property
    def index(self) -> int:
        """As in ``cuda:0``."""

    @property
    def environment(self) -> Environment:
        """What its numbers depend on; asking a real device initialises CUDA."""

    extra: Mapping[str, str]
    """What other plugins add to the environment."""

    @property
    def total_memory(self) -> int:
        """Bytes; asking a real device initialises CUDA."""

    @property
    def recorder(self) -> Recorder | None:
        """What remembers every block, ``None`` where nothing is recorded."""

    @property
    def workspaces(self) -> Callable[[], frozenset[Block]] | None:
        """What returns the live workspaces of cuBLAS and cuBLASLt; ``None``: it cannot be told."""

    def active(self) -> AbstractContextManager[object]:
        """Serve ``cuda`` from this device inside."""

    def begin_test(self, name: str, fixtures: Sequence[object], renewed: Renewed) -> None:
        """Begin the test ``name``: forget earlier ones, but for what its ``fixtures`` hold.

        They are in the order in which pytest sets them up, whether they are set up by now or not.
        ``renewed`` is told of each whose set-up the device repeats.
        """

    def absent(self, fixtures: Iterable[object]) -> Sequence[object]:
        """Return those ``fixtures`` whose blocks are not in the memory of the present test."""

    def bring(self, fixture: object) -> None:
        """Repeat in the memory of the present test the set-up of such a fixture."""

    def begin_body(self) -> None:
        """Begin a run of the test's body: its fixtures are set up."""

    def measuring(self, name: str) -> AbstractContextManager[object]:
        """Let the test ``name`` go from set-up to teardown inside.

        Threads that start there are its own; Python's garbage collector runs as befits numbers.
        """

    def unmeasured(self) -> AbstractContextManager[None]:
        """Let what happens inside leave no sentence about the test's numbers."""

    def restart_collector(self) -> None:
        """Let the garbage collector know nothing of what has run so far."""

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

    def share(self, folder: Path) -> Sequence[HostDevice]:
        """Share the device, and those beside it, with the processes that meet in ``folder``.

        Returns them as the host sees them, the tests' own first.
        """

    def held(self, name: str) -> tuple[int, int]:
        """Return what this process holds of the shared device ``name``, between two tests.

        Bytes of its CUDA context, and of what the allocator has reserved.
        """

    def limited(self, size: int) -> AbstractContextManager[None]:
        """Let this process reserve ``size`` bytes at most inside.

        Raises ``QuotaError`` where that does not take effect.
        """

    def refusals(self) -> AbstractContextManager[Sequence[Refusal]]:
        """Return the list that takes what the allocator cannot serve inside, in order."""

    def fault(self) -> str | None:
        """Return the error that every further use of the device raises, ``None`` for none."""

    @property
    def shares_faults(self) -> bool:
        """Whether a fault in another process that uses the device is one in this process, too."""

    def empty_cache(self) -> None:
        """Give unused segments back to the driver, where the device has been used at all."""

    def nvml(self) -> Mapping[str, Any] | None:
        """Return a device-level reading as builtin types, ``None`` where there is no device."""
