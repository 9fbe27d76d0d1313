"""The interface of devices to the rest of the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_gpumem.device import ValueLevel
from pytest_gpumem.values.environment import Environment
from pytest_gpumem.values.errors import UnknownValueError
from pytest_gpumem.values.measurement import Measurement

if TYPE_CHECKING:
    # These import torch, which a process without marked tests does not need.
    from pytest_gpumem.measurement.fixtures import Renewed
    from pytest_gpumem.measurement.recorded import Recorder
    from pytest_gpumem.measurement.statistics import Block
    from pytest_gpumem.sharing.admission import FailedAllocation
    from pytest_gpumem.sharing.devices import HostDevice
    from pytest_gpumem.simulated.machine.values.work import Work


class Device:
    """A device that tests are measured on; a method that only some devices need does nothing."""

    index: int
    """The device's index, as in ``cuda:0``."""
    extra: Mapping[str, str] = MappingProxyType({})
    """The entries that other plugins add to the environment."""
    workspaces: Callable[[], frozenset[Block]] | None = None
    """The function returning live cuBLAS and cuBLASLt workspaces, ``None`` if unknown."""
    compile_context: Callable[[], AbstractContextManager[object]] | None = None
    """Function that returns a context manager around compilation that leaves no memory reserved;
    ``None`` where compilers use the test's memory."""

    @property
    def filled(self) -> Mapping[int, int]:
        """The bytes, by device, that fill the free space in segments of earlier tests."""
        return MappingProxyType({})

    @property
    def environment(self) -> Environment:
        """The environment that its numbers depend on; on a real device this initialises CUDA."""
        raise NotImplementedError

    @property
    def total_memory(self) -> int:
        """The bytes of the device's memory; on a real device this initialises CUDA."""
        raise NotImplementedError

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of every block, ``None`` where nothing is recorded."""
        return None

    def active(self) -> AbstractContextManager[object]:
        """Make ``cuda`` this device inside."""
        raise NotImplementedError

    def begin_test(self, name: str, fixtures: Sequence[object], renewed: Renewed) -> None:
        """Begin the test ``name``: forget earlier ones, except the memory of its ``fixtures``.

        They are in the order in which pytest sets them up, whether or not they are set up yet.
        ``renewed`` is called for each one whose set-up the device repeats.
        """

    def not_in_memory(self, fixtures: Iterable[object]) -> Sequence[object]:
        """Return those ``fixtures`` whose blocks are not in the memory of the current test."""
        return ()

    def repeat_set_up(self, fixture: object) -> None:
        """Allocate again the blocks of a ``fixture`` that :meth:`not_in_memory` returned."""

    def begin_body(self) -> None:
        """Begin a run of the test's body; its fixtures are set up."""

    def measuring(self, name: str) -> AbstractContextManager[object]:
        """Run the test ``name`` inside, from set-up to teardown.

        Threads that start inside belong to it; garbage is collected so that numbers repeat.
        """
        raise NotImplementedError

    def unmeasured(self) -> AbstractContextManager[None]:
        """Keep peaks in the ``with`` block out of the estimates and notes of the test."""
        return nullcontext()

    def restart_collector(self) -> None:
        """Reset the garbage collector's counters."""

    def begin_unmeasured(self) -> None:
        """Drop the records of earlier tests before a test that is not measured."""

    def end_body(self) -> None:
        """End a run of the body: wait for its threads, or raise the failure of one."""

    def setting_up(self, fixture: object) -> AbstractContextManager[object]:
        """Set up ``fixture``, of any scope, in the ``with`` block."""
        raise NotImplementedError

    def forget(self, fixture: object) -> None:
        """Drop the records of a fixture that has been torn down."""

    def complete(self, measurement: Measurement) -> Measurement:
        """Return ``measurement`` with the fields that only this kind of device fills."""
        raise NotImplementedError

    def share(self, folder: Path) -> Sequence[HostDevice]:
        """Share the GPUs with processes that use ``folder``; return them, this process's first."""
        raise NotImplementedError

    def held(self, name: str) -> tuple[int, int]:
        """Return this process's bytes on the shared device ``name``: of its context, reserved."""
        raise NotImplementedError

    def limited(self, size: int) -> AbstractContextManager[None]:
        """Limit this process to reserving ``size`` bytes inside; may raise ``QuotaError``."""
        raise NotImplementedError

    def failed_allocations(self) -> AbstractContextManager[Sequence[FailedAllocation]]:
        """Return the list that collects the allocator's refusals inside, in order."""
        raise NotImplementedError

    def fault(self) -> str | None:
        """Return the error that every further use of the device raises, ``None`` for none."""
        return None

    @property
    def shares_faults(self) -> bool:
        """Whether a fault in another process on the device is also a fault in this process."""
        return False

    def empty_cache(self) -> None:
        """Return unused segments to the driver, if the device has been used at all."""

    def nvml(self) -> Mapping[str, Any] | None:
        """Return a device-level reading as builtin types, ``None`` where there is no device."""
        return None


class ComputingDevice(Device):
    """A simulated or dry device, on which the CPU can compute values of tensors."""

    @property
    def next_level(self) -> ValueLevel | None:
        """The next higher level of values for a rerun; None if this device already computes all."""
        raise NotImplementedError

    @property
    def decided_by(self) -> str | None:
        """The reason for a further run although nothing failed; ``None`` if none is needed."""
        return None

    def reason_to_rerun(self, error: BaseException | None, *, failed: bool) -> str | None:
        """Return why the test has to run again with more values; ``None`` if it has not.

        ``error`` ended its run; ``failed``: the exception is from its own code.
        """
        if isinstance(error, UnknownValueError):
            return str(error)
        placeholder = "it failed after it read a value that is not computed"
        return self.decided_by or (placeholder if failed and self.used_placeholder else None)

    @property
    def used_placeholder(self) -> bool:
        """Whether the current test has read a value that was not computed."""
        raise NotImplementedError

    @property
    def work(self) -> Work:
        """The work of computing the values of the current test."""
        raise NotImplementedError

    @property
    def events_hash(self) -> int:
        """A hash of the allocator's events in the current test."""
        raise NotImplementedError

    def note(self, sentence: str) -> None:
        """Add ``sentence`` to the notes of the current test."""
        raise NotImplementedError


def is_set_up(fixture: object) -> bool:
    """Return whether pytest's ``fixture`` has a value now."""
    return getattr(fixture, "cached_result", None) is not None


def is_shared(fixture: object) -> bool:
    """Return whether pytest's ``fixture`` outlives a test."""
    return getattr(fixture, "scope", "function") != "function"
