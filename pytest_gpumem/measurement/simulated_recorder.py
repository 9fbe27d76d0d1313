"""The blocks and events of simulated GPUs, in attribution's interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pytest_gpumem.allocator.trace import FREE
from pytest_gpumem.attribution.history import Event, Origin
from pytest_gpumem.measurement.statistics import SUPPLY
from pytest_gpumem.simulated.splits import Splits

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import SimulatedMachine


class SimulatedRecorder:
    """A recorder of the simulated GPUs, whose blocks and events are always recorded."""

    def __init__(self, simulation: SimulatedMachine) -> None:
        self._gpus = simulation.gpus

    def positions(self) -> tuple[int, ...]:
        """Return the number of events of each device."""
        return tuple([gpu.allocator.trace.position for gpu in self._gpus])

    def held(self, device: int) -> list[tuple[int, int, Origin | None]]:
        """Return address, bytes and origin of every live block."""
        memory = self._gpus[device].allocator
        contexts = memory.live_contexts()
        return [
            (address, nbytes, contexts[address]) for address, nbytes in memory.live_blocks().items()
        ]

    def events(self, device: int, begin: int) -> Iterator[Event]:
        """Yield the events from position ``begin`` on, one for each position."""
        for action, address, size, _, context in self._gpus[device].allocator.trace.raw(begin):
            if action == "alloc":
                yield Event(True, address, context.nbytes if context else size, context)
            else:
                # A free that a stream delays has been requested: its bytes no longer count.
                freed = action in (FREE, "free_requested")
                yield Event(False, address if freed else 0, 0, None)

    def reserved(self, device: int, begin: int) -> Sequence[int]:
        """Return the bytes held from the driver at position ``begin``, and after each event."""
        memory = self._gpus[device].allocator
        changes = [SUPPLY.get(action, 0) * size for action, _, size, *_ in memory.trace.raw(begin)]
        return list(accumulate(changes, initial=memory.reserved - sum(changes)))

    def segments(self, device: int) -> Sequence[Mapping[str, Any]]:
        """Return the segments held from the driver now, in the form of a snapshot."""
        return self._gpus[device].allocator.segments(frames=False)

    def splits(
        self, device: int, begin: int, segments: Sequence[Mapping[str, Any]]
    ) -> Sequence[int]:
        """Return the bytes of free parts of segments in use, as :meth:`reserved` does.

        ``segments`` are those at position ``begin``. Empty where the result of the events differs
        from the allocator's own number.
        """
        memory = self._gpus[device].allocator
        splits = Splits(segments)
        series = [splits.bytes, *splits.after(memory.trace.raw(begin))]
        return series if series[-1] == memory.inactive_split else ()

    def last_failure(self, device: int) -> tuple[int, Origin | None] | None:
        """Return the position and the origin of the last allocation that found no memory."""
        failure = None
        for position, event in enumerate(self._gpus[device].allocator.trace.raw(0)):
            if event[0] == "oom":
                failure = position, event[-1]
        return failure
