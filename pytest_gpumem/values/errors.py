"""Errors of a simulation; each message is one sentence."""

from __future__ import annotations


class SimulationError(BaseException):
    """Base of everything that stops a simulated run; its text is one sentence for the user.

    Like pytest's own outcomes not an ``Exception``: code under test that catches those must not
    continue as if it had read a value.
    """


class UnknownValueError(SimulationError):
    """A read of a value that a shape-only execution does not have."""


class UnsupportedOperatorError(SimulationError):
    """An operator that the simulated device cannot run."""


class UndescribedKernelError(UnsupportedOperatorError):
    """A library's own kernel, called without a description of it; ``kernel`` is its name."""

    def __init__(self, sentence: str, kernel: str) -> None:
        super().__init__(sentence)
        self.kernel = kernel

    def __reduce__(self) -> tuple[type[UndescribedKernelError], tuple[str, str]]:
        return type(self), (str(self), self.kernel)


class UnsupportedModuleError(UnsupportedOperatorError, ModuleNotFoundError):
    """An import from a library that is not installed, of a part that its stand-in does not have.

    Code that can do without the library catches it as the error of a missing module.
    """


class HostMemoryError(SimulationError):
    """Real values of all tensors do not fit in the memory of this machine."""


class WorkLimitError(SimulationError):
    """Computing real values takes longer than it may."""
