"""Errors of a simulation; each message is one sentence."""

from __future__ import annotations


class SimulationError(BaseException):
    """Base of errors that stop a simulated run; its text is one sentence for the user.

    Like pytest's outcomes it is no ``Exception``: code under test that catches exceptions must not
    continue as if it had read a value.
    """


class UnknownValueError(SimulationError):
    """A read of a value that a shape-only execution does not have."""


class UnsupportedOperatorError(SimulationError):
    """An operator that the simulated device cannot run."""


class UndescribedKernelError(UnsupportedOperatorError):
    """A call of a library's kernel that has no description; ``kernel`` is its name."""

    def __init__(self, sentence: str, kernel: str) -> None:
        super().__init__(sentence)
        self.kernel = kernel

    def __reduce__(self) -> tuple[type[UndescribedKernelError], tuple[str, str]]:
        return type(self), (str(self), self.kernel)


class UnsupportedModuleError(UnsupportedOperatorError, ModuleNotFoundError):
    """An import of a part that the stand-in for a missing library does not have.

    Code with a fallback for the missing library catches it as ``ModuleNotFoundError``.
    """


class HostMemoryError(SimulationError):
    """Real values of all tensors do not fit in the memory of this machine."""


class WorkLimitError(SimulationError):
    """Computing real values takes longer than the limit."""
