"""Tensors that kernels of compiled code write to, reported to the machine that runs the code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Launched:
    """The receiver of launches; wrappers outlive the simulations that they were made in."""

    def __init__(self) -> None:
        self.wrote: Callable[..., None] | None = None
        """Called with the tensors that a kernel wrote to; ``None`` while nothing is simulated."""

    @contextmanager
    def reporting_to(self, wrote: Callable[..., None]) -> Iterator[None]:
        """Call ``wrote`` for writes inside."""
        before, self.wrote = self.wrote, wrote
        try:
            yield
        finally:
            self.wrote = before


launched = Launched()
"""The only receiver, because a simulation replaces names of the whole process."""
