"""What a simulation cannot do, said in one sentence."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """Base of everything that stops a simulated run; its text is one sentence for the user."""


class UnknownValueError(SimulationError):
    """Code asked for a value that a shape-only execution does not have."""


class UnsupportedOperatorError(SimulationError):
    """An operator that the simulated device does not know how to run."""
