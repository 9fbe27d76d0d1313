"""Which iteration of a script's loop memory was needed in, and what for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pytest_gpumem.measurement.automatic_phases import BACKWARD, FORWARD, STEP
from pytest_gpumem.measurement.phases import Phase, PhaseTracker
from pytest_gpumem.script.iterations import ITERATION, LOAD, numbered
from pytest_gpumem.values.measurement import CALL, SETUP, PhaseRecord

PARTS = (FORWARD, BACKWARD, STEP)


class Iterations(PhaseTracker):
    """The phases of a script: ``load``, then ``iteration_1`` with ``forward_1`` and so on in it.

    One that accumulates gradients has several forwards in an iteration, which are one phase.
    """

    _count = 0
    _present: Phase | None = None
    _is_over = False

    def load(self) -> None:
        """The script begins."""
        self._present = super().enter(LOAD)

    def enter(self, name: str) -> Phase | None:
        """Begin the phase ``name``, of the present iteration where that is found by itself."""
        if name not in PARTS:
            return super().enter(name)
        if self._is_over:  # what a script does on its way out is no iteration
            return None
        if not self._count:
            self.iterated(more=True)
        return super().enter(numbered(name, self._count))

    def iterated(self, *, more: bool) -> None:
        """What went on has ended, and another iteration begins where there are ``more``."""
        if self._present is not None:
            self.leave(self._present)
        self._present = None
        self._is_over = not more
        if more:
            self._count += 1
            self._present = super().enter(numbered(ITERATION, self._count))


def shown_phases(found: Mapping[str, PhaseRecord], steps: int) -> dict[str, PhaseRecord]:
    """Return those of ``found`` that tell something, in order.

    Without a step there are no iterations: a script that infers has one ``forward``.
    """
    return {phase.name: phase for phase in _shown(found, steps)}


def _shown(found: Mapping[str, PhaseRecord], steps: int) -> Iterator[PhaseRecord]:
    for name, phase in found.items():
        if name in (SETUP, CALL):
            continue
        part, _, number = name.rpartition("_")
        parent = None if phase.parent == CALL else phase.parent
        if not steps and part == ITERATION:
            continue
        if not steps and part in PARTS and number == "1":
            yield replace(phase, name=part, parent=None)
        else:
            yield replace(phase, parent=parent)
