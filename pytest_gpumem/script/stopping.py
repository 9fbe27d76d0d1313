"""The end of a script after a number of steps or seconds."""

from __future__ import annotations

import os
import signal
import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_gpumem.simulated.common.callsite import is_internal

PATIENCE = 0.01
"""Seconds before a further attempt to stop a script that was inside an operator."""


_HAS_TIMER = hasattr(signal, "setitimer")
"""Whether the system has a timer that sends a signal; Windows does not."""

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_DEVICE = f"{_PACKAGE}simulated{os.sep}"


class StopError(BaseException):
    """The exception that ends a script after enough steps or time.

    It is no ``Exception``, so that it also ends loops that catch those; ``finally`` blocks run.
    """


class Steps:
    """A counter of the steps of the optimizer that steps first, the leader.

    If others step between the leader's first two steps, such as a generator's beside a
    discriminator's, an iteration ends with the last of them. A skipped step, as when ``GradScaler``
    found an infinity, does not count.
    """

    def __init__(self, most: int, over: Callable[[bool], None] = lambda more: None) -> None:
        self._most = most
        self._at_iteration_end = over
        """Function called at the end of each iteration, with whether there are more."""
        self._leader: Callable[[], Optimizer | None] = lambda: None
        self._last: Callable[[], Optimizer | None] = lambda: None
        """The last optimizer to step in one iteration, if it is not the leader."""
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count steps inside, and raise :class:`StopError` after the requested number."""
        before = register_optimizer_step_pre_hook(self._step_begins)
        after = register_optimizer_step_post_hook(self._step_ends)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._leader() is optimizer and self._is_enough:  # the others have not stepped
            raise StopError

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._leader() is None:  # no optimizer has stepped yet, or the leader was deleted
            self._leader, self._last = ref(optimizer), lambda: None
        if optimizer is self._leader():
            self.count += 1
            if self._last() is None:
                self._iteration_ends()
        elif self.count == 1:
            self._last = ref(optimizer)
        elif optimizer is self._last():
            self._iteration_ends()

    def _iteration_ends(self) -> None:
        self._at_iteration_end(not self._is_enough)
        if self._is_enough:
            raise StopError

    @property
    def _is_enough(self) -> bool:
        return self.count >= self._most


class Alarm:
    """A timer that raises :class:`StopError` in the main thread after a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.rang = False

    @contextmanager
    def set(self) -> Iterator[None]:
        """Run the timer inside."""
        timer = threading.Timer(self._seconds, interrupt_main)
        timer.daemon = True
        number = signal.SIGALRM if _HAS_TIMER else signal.SIGINT
        before = signal.signal(number, self._ring)
        if _HAS_TIMER:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
        else:
            timer.start()
        try:
            yield
        finally:
            if _HAS_TIMER:
                signal.setitimer(signal.ITIMER_REAL, 0)
            timer.cancel()
            signal.signal(number, before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if not _computes(frame):
            self.rang = True
            raise StopError
        if _HAS_TIMER:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)


def _computes(frame: FrameType | None) -> bool:
    """Return whether ``frame`` is inside the simulation of an operator, which has to finish."""
    innermost = True
    while frame is not None and is_internal(frame.f_code.co_filename):
        own = frame.f_code.co_filename.startswith(_PACKAGE)
        if own and (innermost or frame.f_code.co_filename.startswith(_DEVICE)):
            return True
        innermost = innermost and own
        frame = frame.f_back
    return False
