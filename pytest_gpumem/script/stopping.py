"""The end of a script after a number of steps or seconds."""

from __future__ import annotations

import math
import os
import signal
import sys
import sysconfig
import threading
import time
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

from pytest_gpumem.simulated.common.callsite import is_internal, is_own

PATIENCE = 0.01
"""Seconds before a further attempt to stop a script that was inside an operator."""


_HAS_TIMER = hasattr(signal, "setitimer")
"""Whether the system has a timer that sends a signal; Windows does not."""

_STARTER = str(Path(__file__).with_name("entry.py"))
"""The file whose frame is the outermost one of a script."""
_WRAPPERS = str(Path(__file__).resolve().parents[1] / "measurement") + os.sep
"""The folder of the functions around a script's calls of modules and ``backward()``."""
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = sysconfig.get_path("purelib") + os.sep


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
    """A timer that raises :class:`StopError` in a script after a number of seconds.

    A signal interrupts the main thread, whatever it waits for, except in code of this package,
    which a half-done operator would leave in disorder. A run that computes values is nearly always
    there, and its ``backward()`` may run in a thread of autograd: such operators call
    :meth:`check` before they begin.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = math.inf
        """The time at which to stop the script; infinite if it has been stopped, or has ended."""
        self.rang = False
        self._timer: threading.Timer | None = None

    @contextmanager
    def set(self) -> Iterator[None]:
        """Run the timer inside."""
        number = signal.SIGALRM if _HAS_TIMER else signal.SIGINT
        before, unraisable = signal.signal(number, self._ring), sys.unraisablehook

        def report(error: sys.UnraisableHookArgs) -> None:
            if not issubclass(error.exc_type, StopError):
                unraisable(error)
                return
            # It was raised in a finalizer or a callback of the script's, where it ends nothing.
            self._end, self.rang = 0.0, False
            self._start(PATIENCE)

        sys.unraisablehook = report
        self._end = time.monotonic() + self._seconds
        self._start(self._seconds)
        try:
            yield
        finally:
            self._end = math.inf
            self._start(0)
            signal.signal(number, before)
            sys.unraisablehook = unraisable

    def check(self) -> None:
        """Raise :class:`StopError` if the time is over, once: ``finally`` blocks run afterwards."""
        if time.monotonic() >= self._end:
            self._stop()

    def _start(self, seconds: float) -> None:
        """Send a signal in so many seconds; with 0, send none."""
        if _HAS_TIMER:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return
        if self._timer is not None:
            self._timer.cancel()
        if seconds:
            self._timer = threading.Timer(seconds, interrupt_main)
            self._timer.daemon = True
            self._timer.start()

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._end == math.inf:
            return
        if _computes(frame):
            self._start(PATIENCE)
        else:
            self._stop()

    def _stop(self) -> None:
        self._end, self.rang = math.inf, True
        raise StopError


def _computes(frame: FrameType | None) -> bool:
    """Return whether ``frame`` is in code of this package, or was called by it for an operator."""
    innermost = True
    while frame is not None and (file := frame.f_code.co_filename) != _STARTER:
        if is_own(file):
            if innermost or not file.startswith(_WRAPPERS):
                return True
        elif not _is_standard(file):  # which this package calls in finalizers, too
            innermost = False
            if not is_internal(file):
                return False
        frame = frame.f_back
    return False


def _is_standard(file: str) -> bool:
    if file.startswith("<"):  # frozen, or made by the standard library: a dataclass's __init__
        return True
    return file.startswith(_STANDARD) and not file.startswith(_INSTALLED)
