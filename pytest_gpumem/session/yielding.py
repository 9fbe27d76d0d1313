"""The interruption of an opportunistic test where a guaranteed one waits for its memory."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOKED_EVERY = 0.1
"""Seconds between two checks whether another test waits."""

_SIGNAL = getattr(signal, "SIGUSR2", None)


class YieldedError(BaseException):
    """A test makes room for another; not an ``Exception``, so that no test handles it."""


@contextmanager
def interruptible(has_to_yield: Callable[[], bool]) -> Iterator[None]:
    """Raise :class:`YieldedError` inside as soon as ``has_to_yield``, called in a thread, is true.

    Only in the main thread and where the system has signals, as on Linux and macOS: a sleep or a
    wait inside ends, too, a kernel that runs is waited for. Elsewhere the test runs to its end.
    """
    if _SIGNAL is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    inside = True

    def interrupt(number: int, frame: object) -> None:
        if inside:
            raise YieldedError

    before = signal.signal(_SIGNAL, interrupt)
    done = threading.Event()
    main = threading.get_ident()

    def watch() -> None:
        while not done.wait(LOOKED_EVERY):
            if has_to_yield():
                signal.pthread_kill(main, _SIGNAL)
                return

    watcher = threading.Thread(target=watch, name="gpumem-yield", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            inside = False
    finally:
        # Also where the signal came while the block was being left.
        done.set()
        watcher.join()
        signal.signal(_SIGNAL, before)
