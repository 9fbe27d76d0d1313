"""The iterations of a script's loop as phases of its memory."""

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

    A script that accumulates gradients has several forwards in an iteration, which are one phase.
    """

    _count = 0
    _present: Phase | None = None
    _is_over = False

    def load(self) -> None:
        """Begin the phase before the first iteration."""
        self._present = super().enter(LOAD)

    def enter(self, name: str) -> Phase | None:
        """Begin the phase ``name``, numbered by iteration where it is an automatic phase."""
        if name not in PARTS:
            return super().enter(name)
        if self._is_over:  # code at a script's exit is no iteration
            return None
        if not self._count:
            self.iterated(more=True)
        return super().enter(numbered(name, self._count))

    def iterated(self, *, more: bool) -> None:
        """End the current phase, and begin another iteration if there are ``more``."""
        if self._present is not None:
            self.leave(self._present)
        self._present = None
        self._is_over = not more
        if more:
            self._count += 1
            self._present = super().enter(numbered(ITERATION, self._count))


def shown_phases(found: Mapping[str, PhaseRecord], steps: int) -> dict[str, PhaseRecord]:
    """Return the informative ones of ``found``, in order.

    Without an optimizer's step there are no iterations: inference has one ``forward``.
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
