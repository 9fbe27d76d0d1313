"""Exclusive use of torch by the thread that compiles: replaced names are put back then.

Replacements hold for all threads of the process, and a thread that compiles has to see torch's own
functions. So nothing is compiled while another thread of the simulation lives that has used torch.
The thread of a ``DataLoader`` that pins memory may: it pins under the lock of operators, which the
compiling thread holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from time import monotonic, sleep
from types import FrameType
from typing import Any

from torch.utils.data._utils import pin_memory as loaders

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.dispatch import Dispatch

_LOADERS_LOOP = "_pin_memory_loop"


class Exclusive:
    """Gives one thread exclusive use of torch.

    ``threads`` are those that take part in the simulation; operators run in ``execution``.
    """

    patience = 1.0
    """Seconds in which a thread that has done its work has to end."""

    def __init__(self, execution: Dispatch, threads: Callable[[], Collection[int]]) -> None:
        self._execution = execution
        self._threads = threads
        self._holder: int | None = None
        self.patches = Patches()
        """The replacement that stays while names are put back."""
        self.patches.add(loaders, "pin_memory", self._in_turn(loaders.pin_memory))

    @property
    def is_mine(self) -> bool:
        """Whether this thread has exclusive use of torch."""
        return self._execution.lock is None or self._holder == get_ident()

    @contextmanager
    def taken(self) -> Iterator[bool]:
        """Have exclusive use inside; yield ``False`` if another thread lives."""
        lock = self._execution.lock
        if lock is None or self.is_mine:
            yield True
        elif not self._is_alone():
            yield False
        else:
            with lock:
                self._holder = get_ident()
                try:
                    yield True
                finally:
                    self._holder = None

    def _is_alone(self) -> bool:
        until = monotonic() + self.patience
        while self._others_live():
            if monotonic() > until:
                return False
            sleep(0.02)
        return True

    def _others_live(self) -> bool:
        frames = sys._current_frames()
        return any(
            thread in self._execution.users and not _is_loaders(frames[thread])
            for thread in self._threads()
            if thread in frames and thread != get_ident()
        )

    def _in_turn(self, pin: Callable[..., Any]) -> Callable[..., Any]:
        def pin_memory(*args: Any, **options: Any) -> Any:
            with self._execution.lock or nullcontext():
                return pin(*args, **options)

        return pin_memory


def _is_loaders(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _LOADERS_LOOP:
            return True
        frame = frame.f_back
    return False
