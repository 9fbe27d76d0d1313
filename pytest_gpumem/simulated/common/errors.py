"""What a simulation cannot do, said in one sentence."""

from __future__ import annotations


class SimulationError(BaseException):
    """Base of everything that stops a simulated run; its text is one sentence for the user.

    Like pytest's own outcomes not an ``Exception``: code under test that catches those must not
    go on as if it had seen a value.
    """


class UnknownValueError(SimulationError):
    """Code asked for a value that a shape-only execution does not have."""


class UnsupportedOperatorError(SimulationError):
    """An operator that the simulated device does not know how to run."""


class HostMemoryError(SimulationError):
    """Real values of all tensors do not fit in the memory of this machine."""


class WorkLimitError(SimulationError):
    """Computing real values takes longer than it may."""
