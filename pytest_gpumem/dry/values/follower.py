"""The values of a dry device: the known ones, and their use in a test's run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from pytest_gpumem.dry.values.dispatch import followed
from pytest_gpumem.dry.values.execution import Execution
from pytest_gpumem.dry.values.frames import snapshots_without_own
from pytest_gpumem.dry.values.graphs import Graphs
from pytest_gpumem.dry.values.known import DryValues
from pytest_gpumem.dry.values.launches import launches_seen
from pytest_gpumem.dry.values.memory import Memory
from pytest_gpumem.dry.values.reads import Reads
from pytest_gpumem.simulated.machine.notes import Notes
from pytest_gpumem.simulated.machine.storages import Storages
from pytest_gpumem.simulated.machine.values.work import Work


class Follower:
    """A follower of the values of the tests on one device, one after the other."""

    def __init__(self, *, follows: bool, everything: bool) -> None:
        self._notes = Notes()
        self._storages = Storages()
        self._follows = follows
        self._everything = everything
        self._reads = Reads(
            self._storages,
            self._notes,
            lambda read: self._values.refusal(read),
            followed=follows,
            everything=everything,
        )
        self._memory = Memory(self._reads.unknown_read)
        self._values = DryValues(self._memory, self._storages, self._notes, everything=everything)
        self._graphs = Graphs(self._memory, self._values)
        self._execution = Execution(
            self._memory, self._storages, self._values, self._reads, self._graphs
        )
        self._depth = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Follow the values inside."""
        if self._depth:
            yield
            return
        self._depth += 1
        self._memory.begin(everything=self._everything, followed=self._follows)
        self._values.resume()
        try:
            with ExitStack() as inside:
                inside.enter_context(self._reads.patched())
                inside.enter_context(launches_seen(self._values, self._graphs))
                if self._follows:
                    inside.enter_context(followed(self._execution))
                    inside.enter_context(snapshots_without_own())
                    inside.enter_context(self._graphs.replays_computed())
                yield
        finally:
            self._memory.end()
            self._depth -= 1

    def moving(self, starts: Sequence[int]) -> Callable[[Mapping[int, torch.Tensor]], None]:
        """Keep values over a change of addresses; see :meth:`DryValues.moving`."""
        return self._values.moving(starts)

    def following(self) -> AbstractContextManager[None]:
        """Return a context in which values are followed, even where the test's are not."""
        return nullcontext() if self._follows else followed(self._execution)

    def begin(self) -> None:
        """Begin a test."""
        self._memory.renew()
        self._reads.begin()
        self._values.begin()

    @property
    def work(self) -> Work:
        """The work of computing all values of the present test."""
        return self._values.work

    @property
    def notes(self) -> Sequence[str]:
        """Notes for readers of the numbers."""
        return tuple(self._notes.notes)

    def note(self, sentence: str) -> None:
        """Add ``sentence`` to the notes of the present test."""
        self._notes.note(sentence)

    @property
    def decided(self) -> str | None:
        """The decision of the present test by an unknown value; ``None`` for none."""
        return self._reads.decided

    @property
    def made_up(self) -> bool:
        """Whether the present test has read an unknown value."""
        return self._reads.made_up or self._notes.granted
