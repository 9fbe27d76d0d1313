"""Threads that a test leaves running on a real GPU, which cannot attribute their memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures.thread import _worker
from contextlib import contextmanager
from weakref import WeakKeyDictionary

_LIBRARIES = frozenset({"multiprocessing", "torch", "tqdm"})


class LeftThreads:
    """The threads that outlive the tests that started them.

    Those of executors are left out: they wait for tasks, and live until their executor is shut.
    """

    def __init__(self) -> None:
        self._owners: WeakKeyDictionary[threading.Thread, str | None] = WeakKeyDictionary()
        """The test that started each; ``None``: a fixture that tests share, which outlives them."""

    @contextmanager
    def started_by(self, owner: str | None) -> Iterator[None]:
        """Record ``owner`` for threads that start inside and have no owner yet."""
        before = set(threading.enumerate())
        try:
            yield
        finally:
            for thread in set(threading.enumerate()) - before:
                if getattr(thread, "_target", None) is not _worker:
                    self._owners.setdefault(thread, owner)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the test: one sentence for each thread that still runs."""
        return tuple(
            f"{owner} left {thread.name!r} running in a thread: what it allocates is counted here"
            for thread, owner in list(self._owners.items())
            if owner is not None and thread.is_alive() and not _is_of_library(thread)
        )


def _is_of_library(thread: threading.Thread) -> bool:
    """Return whether ``thread`` is a helper of a library's, or was started by C++.

    Inductor's compile workers and tqdm's monitor keep such threads permanently, and the queues of a
    ``DataLoader``'s workers for a moment.
    """
    found = getattr(thread, "_target", None) or type(thread)
    package = str(getattr(found, "__module__", "")).partition(".")[0]
    return isinstance(thread, threading._DummyThread) or package in _LIBRARIES


def is_set_up(fixture: object) -> bool:
    """Return whether pytest's ``fixture`` has a value now."""
    return getattr(fixture, "cached_result", None) is not None


def is_shared(fixture: object) -> bool:
    """Return whether pytest's ``fixture`` outlives a test."""
    return getattr(fixture, "scope", "function") != "function"
