"""Exclusive use of torch by one thread, which compiling needs: replaced names are put back then.

Replacements hold for all threads. A thread that compiles has to see torch's own functions, and
others must not, so they rest. Threads that the code under test starts are watched by
``sys.setprofile``, which reports each call before it is made: while one thread compiles, another
that uses torch, or whose code imports it, stops at its next call, and any other stops when it
enters torch. Threads that never do (a progress bar's, a timer's) continue. Watching makes Python
twice as slow, so a thread that starts before the first ``torch.compile`` is not watched: it rests
where it waits for others, and counts as running once it has used torch.

A thread does not rest where it may hold a lock that compiling needs: in an operator that is being
simulated, in an import, in logging. The thread that began the simulation is not watched. It rests
where it waits for others: in ``join()``, in ``Future.result()``, and for the lock of operators.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import get_ident
from time import monotonic, sleep
from types import CodeType, FrameType
from typing import Any

import torch

from pytest_gpumem.simulated.machine.dispatch import Dispatch
from pytest_gpumem.simulated.surface.compilers import told_to_compile

_LOOKS = 0.02
"""Seconds between two checks of what a thread does."""

_STUCK = 5.0
"""Seconds in which a compiling thread has moved on, unless it waits for a lock."""

_SIMULATED = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_AROUND = (__file__, str(Path(__file__).with_name("threads.py")))
"""Files of this package whose functions surround a thread's own code."""

_KEEPS_LOCKS = (
    "_frozen_importlib",
    "_frozen_importlib_external",
    "concurrent.futures.thread",
    "functools",
    "importlib",
    "logging",
    "threading",
    "torch._dynamo.guards",
)
"""Modules whose functions call others while they hold a lock that all threads use."""
_KEEPS_NONE = frozenset({"run", "_bootstrap", "_bootstrap_inner", "_worker"})

Event = tuple[FrameType, str, Any]


class Standstill:
    """Gives one thread exclusive use of torch.

    ``threads`` are those that take part in the simulation; operators run in ``execution``.
    """

    patience = 10.0
    """Seconds in which others come to rest; after a failure no thread waits for them again."""

    def __init__(self, execution: Dispatch, threads: Callable[[], Collection[int]]) -> None:
        self._execution = execution
        self._threads = threads
        self._changed = threading.Condition()
        self._alone: int | None = None
        self._resting: set[int] = set()
        self._started: set[int] = set()
        """The threads that came after the first one."""
        self._watched: set[int] = set()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has exclusive use of torch."""
        return self._execution.lock is None or self._alone == get_ident()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Make other threads rest inside; yield ``False`` if one did not come to rest in time."""
        lock = self._execution.lock
        if lock is None or self.is_mine:
            yield True
            return
        self._begin()
        profile = sys.getprofile()
        sys.setprofile(None)  # compiling is long
        # Its holder may be waiting for exclusive use, too.
        is_held = lock.acquire(timeout=max(self.patience, 1.0))
        try:
            rest = is_held and self._all_rest()
            if not rest:
                self._end()
            yield rest
        finally:
            if is_held:
                lock.release()
            self._end()
            sys.setprofile(profile)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Make this thread rest inside while another one has exclusive use."""
        self.rest()
        thread = get_ident()
        self._started.add(thread)
        try:
            with self._told_of_calls(thread) if told_to_compile() else nullcontext():
                yield
        finally:
            self._started.discard(thread)

    @contextmanager
    def _told_of_calls(self, thread: int) -> Iterator[None]:
        profile = sys.getprofile()

        def watch(*event: Any) -> None:
            if self._alone is not None and self._alone != thread:
                self._at(event)
            if profile is not None:
                profile(*event)

        self._watched.add(thread)
        sys.setprofile(watch)
        try:
            yield
        finally:
            sys.setprofile(profile)
            self._watched.discard(thread)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Mark this thread as resting inside, where it waits and uses nothing."""
        thread = get_ident()
        before = thread in self._resting
        with self._changed:
            self._resting.add(thread)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._wait_for_end()
                if not before:
                    self._resting.discard(thread)

    def _wait_for_end(self) -> None:
        where = None
        while not self._changed.wait_for(lambda: self._alone in (None, get_ident()), _STUCK):
            alone = sys._current_frames().get(self._alone or 0)
            now = None if alone is None else (id(alone), alone.f_lasti)
            if now == where:
                return  # it waits for a lock that this thread holds: let go of it, and rest then
            where = now

    def rest(self) -> None:
        """Rest for as long as another thread has exclusive use."""
        if not self.is_mine and self._alone is not None:
            with self.resting():
                pass

    def _begin(self) -> None:
        thread = get_ident()
        with self._changed:
            self._resting.add(thread)
            self._changed.wait_for(lambda: self._alone is None)
            self._resting.discard(thread)
            self._alone = thread

    def _end(self) -> None:
        with self._changed:
            if self._alone == get_ident():
                self._alone = None
                self._changed.notify_all()

    def _at(self, event: Event) -> None:
        frame, what, argument = event
        inside = frame.f_back if what == "return" else frame
        enters = (what == "call" and _is_torchs(frame.f_code)) or (
            what == "c_call" and _belongs_to_torch(argument)
        )
        meets = enters or self._uses_torch(get_ident(), inside) or _knows_torch(inside)
        if meets and not _may_hold_lock(inside):
            self.rest()

    def _uses_torch(self, thread: int, frame: FrameType | None) -> bool:
        return thread in self._execution.users or any(_is_torchs(code) for code in _codes(frame))

    def _all_rest(self) -> bool:
        until = monotonic() + self.patience
        before: dict[int, tuple[int, int]] = {}
        while True:
            frames = sys._current_frames()
            now = {thread: (id(each), each.f_lasti) for thread, each in frames.items()}
            going = [
                thread
                for thread in self._threads()
                if thread in frames
                and thread != get_ident()
                and thread not in self._resting
                and not self._is_quiet(thread, frames[thread], before.get(thread) == now[thread])
            ]
            del frames
            if not going:
                return True
            if before and monotonic() > until:
                self.patience = 0.0
                return False
            before = now
            sleep(_LOOKS)

    def _is_quiet(self, thread: int, frame: FrameType, is_still: bool) -> bool:
        """Return whether ``thread`` is where it will be stopped before it meets torch again."""
        if is_still and _simulates(frame.f_code):
            return True  # it waits for the lock of operators, which this thread holds
        if is_still and thread in self._watched:
            return not any(map(_simulates, _codes(frame)))
        return thread in self._started and not self._uses_torch(thread, frame)


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _may_hold_lock(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if _simulates(code) or _keeps_locks(frame.f_globals.get("__name__", ""), code.co_name):
            return True
        frame = frame.f_back
    return False


@cache
def _keeps_locks(module: str, function: str) -> bool:
    of = any(module == each or module.startswith(f"{each}.") for each in _KEEPS_LOCKS)
    return of and function not in _KEEPS_NONE


def _simulates(code: CodeType) -> bool:
    """Return whether this is code of the simulation, which must not be interrupted."""
    filename = code.co_filename
    return filename.startswith(_SIMULATED) and filename not in _AROUND


def _is_torchs(code: CodeType) -> bool:
    return code.co_filename.startswith(_TORCH) or _simulates(code)


def _knows_torch(frame: FrameType | None) -> bool:
    """Return whether the code may inspect a tensor that it gets, which no profiler reports."""
    while frame is not None:
        if "torch" in frame.f_globals:
            return True
        frame = frame.f_back
    return False


def _belongs_to_torch(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    names = (getattr(function, "__module__", None), getattr(owner, "__module__", None))
    return isinstance(owner, torch.Tensor) or any(
        name is not None and str(name).partition(".")[0] == "torch"
        for name in (*names, getattr(owner, "__name__", None))
    )
