"""Exclusive use of torch by the thread that compiles: replaced names are put back then.

Replacements hold for all threads of the process, and a thread that compiles has to see torch's own
functions. So nothing is compiled while another thread of the simulation goes on that has used
torch. Threads do not count that wait for others, in ``join()``, in ``Future.result()`` or for their
own turn, nor the one of a ``DataLoader`` that pins memory: it pins under the lock of operators,
which the compiling thread holds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from time import monotonic, sleep
from types import FrameType
from typing import Any

from torch.utils.data._utils import pin_memory as loaders

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.dispatch import Dispatch

_PATIENCE = 60.0
"""Seconds that a thread waits for a lock which another may hold that waits for it."""
_LOOKS = 0.02
"""Seconds between two looks at the other threads."""
_LOADERS_LOOP = "_pin_memory_loop"


class Exclusive:
    """Gives one thread exclusive use of torch.

    ``threads`` are those that take part in the simulation; operators run in ``execution``.
    """

    patience = 5.0
    """Seconds in which others have to end or wait."""

    def __init__(self, execution: Dispatch, threads: Callable[[], Collection[int]]) -> None:
        self._execution = execution
        self._threads = threads
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._waiting: set[int] = set()
        self.patches = Patches()
        """The replacement that stays while names are put back."""
        self.patches.add(loaders, "pin_memory", self._in_turn(loaders.pin_memory))

    @property
    def is_mine(self) -> bool:
        """Whether this thread has exclusive use of torch."""
        return self._execution.lock is None or self._holder == get_ident()

    @contextmanager
    def taken(self) -> Iterator[bool]:
        """Have exclusive use inside; yield ``False`` if another thread goes on."""
        lock = self._execution.lock
        if lock is None or self.is_mine:
            yield True
            return
        if not self._take():
            yield False
            return
        is_held = self._others_rest() and lock.acquire(timeout=_PATIENCE)
        try:
            yield is_held and not self._others_go_on()
        finally:
            if is_held:
                lock.release()
            with self._changed:
                self._holder = None
                self._changed.notify_all()

    def _take(self) -> bool:
        thread = get_ident()
        is_outer = thread not in self._waiting
        with self._changed:
            self._waiting.add(thread)
            is_free = self._changed.wait_for(lambda: self._holder is None, _PATIENCE)
            if is_outer:
                self._waiting.discard(thread)
            if is_free:
                self._holder = thread
        return is_free

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this thread inside as one that waits for others; then wait for its turn."""
        thread = get_ident()
        is_outer = thread not in self._waiting
        self._waiting.add(thread)
        try:
            yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: self._holder in (None, thread), _PATIENCE)
                if is_outer:
                    self._waiting.discard(thread)

    def _others_rest(self) -> bool:
        """Return whether all others end or wait before long: one may be about to join this one."""
        until = monotonic() + self.patience
        while self._others_go_on():
            if monotonic() > until:
                return False
            sleep(_LOOKS)
        return True

    def _others_go_on(self) -> bool:
        frames = sys._current_frames()
        return any(
            thread in self._execution.users
            and thread not in self._waiting
            and not _is_loaders(frames[thread])
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
