"""Work that a test is not charged for: searches that run until memory is out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

Pause = Callable[[], AbstractContextManager[None]]

_pauses: list[Pause] = []
"""Of the measurements under way: what they measure is the process, so the list is its."""


@contextmanager
def unmeasured() -> Iterator[None]:
    """Leave what happens inside out of every measurement; what it keeps counts from its end on."""
    with ExitStack() as paused:
        for pause in _pauses:
            paused.enter_context(pause())
        yield


@contextmanager
def pausable(pause: Pause) -> Iterator[None]:
    """Let ``pause`` surround what is :func:`unmeasured` inside."""
    _pauses.append(pause)
    try:
        yield
    finally:
        _pauses.remove(pause)
