"""Work that a test is not charged for: searches that run until memory is exhausted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

Pause = Callable[[], AbstractContextManager[None]]

_pauses: list[Pause] = []
"""The pauses of the current measurements, which all measure this process."""


@contextmanager
def unmeasured() -> Iterator[None]:
    """Exclude events inside from every measurement; memory kept counts from the end on."""
    with ExitStack() as paused:
        for pause in _pauses:
            paused.enter_context(pause())
        yield


@contextmanager
def pausable(pause: Pause) -> Iterator[None]:
    """Enter ``pause`` around :func:`unmeasured` work inside."""
    _pauses.append(pause)
    try:
        yield
    finally:
        _pauses.remove(pause)
