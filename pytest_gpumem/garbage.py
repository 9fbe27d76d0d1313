"""Python's garbage collector, left out where it could only look in vain."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

# Here, because code under test may replace what the module has.
from gc import disable, enable, get_objects, get_stats, isenabled
from itertools import chain
from types import FrameType

_YOUNG = (0, 1)
"""Generations that have all new objects, unless the oldest has been collected meanwhile."""

_OLDEST = 2


@contextmanager
def paused() -> Iterator[None]:
    """Let nothing be collected inside, but for who asks for it.

    Reading a large document makes nothing but new objects, and looking through them again and
    again takes half of the time.
    """
    enabled = isenabled()
    disable()
    try:
        yield
    finally:
        if enabled:
            enable()


class FramesLetGo:
    """Lets go of the frames that code inside the ``with`` statement leaves behind.

    A frame object that outlives its function refers to the frame that called it (``f_back``), and
    so on up to the caller's callers; it keeps the local variables of all of them alive until the
    collector runs, or for good. Two kinds of code leave such frames behind: a function that has
    its own frame in a local variable (``wrap`` in torch/fx/_symbolic_trace.py), and an exception
    that is stored or is part of a cycle of references (``FailedMatch`` in
    torch/_inductor/pattern_matcher.py). Exceptions lose their tracebacks, and frames their local
    variables. Nothing is done where an exception is raised out of the ``with`` statement.
    """

    def __enter__(self) -> None:
        self._caller: FrameType | None = sys._getframe(1)
        self._collections = get_stats()[-1]["collections"]

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        caller, self._caller = self._caller, None
        if caller is not None and kind is None:
            is_young = get_stats()[-1]["collections"] == self._collections
            _let_go_of(caller, _YOUNG if is_young else (*_YOUNG, _OLDEST))


def _let_go_of(caller: FrameType, generations: Sequence[int]) -> None:
    """Clear the frames below ``caller`` that are left, and the tracebacks that hold some."""
    left: list[FrameType] = []
    for each in chain.from_iterable(map(get_objects, generations)):
        # Proxies tell what they stand for: type() asks the object itself.
        kind = type(each)
        if kind is FrameType:
            if _is_below(each, caller):
                left.append(each)
        elif issubclass(kind, BaseException):
            traceback = each.__traceback__
            if traceback is not None and _is_below(traceback.tb_frame, caller):
                each.__traceback__ = None
    for frame in left:
        with suppress(RuntimeError):  # it runs, in another thread
            frame.clear()


def _is_below(frame: FrameType, caller: FrameType) -> bool:
    following = frame.f_back
    while following is not None:
        if following is caller:
            return True
        following = following.f_back
    return False
