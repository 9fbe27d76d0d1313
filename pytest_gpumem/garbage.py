"""Python's garbage collector while a test is measured, and frames that keep objects.

CPython collects the youngest generation when 700 more container objects have been made than freed
(``_PyObject_GC_Link`` and the default thresholds in Modules/gcmodule.c up to 3.11 and Python/gc.c
since). Objects of imports, of caches that the first test of a process fills, and of earlier tests
count, too. Tensors in reference cycles are freed only by the collector, so a test's peak would
depend on the tests that run before it.

So a measured body begins with an empty young generation. On a simulated or dry GPU, moreover, the
collector runs when there are 700 more blocks on the GPU than after the last collection. CPython's
own rule applies only at :data:`SPARE` objects, and once after every tenth test
(:data:`FULL_EVERY`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

# Imported by name, because code under test may replace the module's functions.
from gc import (
    collect,
    disable,
    enable,
    freeze,
    get_count,
    get_freeze_count,
    get_objects,
    get_stats,
    get_threshold,
    isenabled,
    set_threshold,
    unfreeze,
)
from importlib.abc import Loader
from inspect import CO_GENERATOR
from itertools import chain
from sys import getrefcount
from threading import get_ident
from types import FrameType, ModuleType

from pytest_gpumem.late_modules import Finder, Wrapped, is_find_spec, watched

_NEW = (0, 1)
"""The generations that contain all new objects, unless the oldest was collected since."""

_OLDEST = 2

GROWTH = 700
"""The growth in blocks of one GPU that triggers a collection: CPython's threshold of objects."""

MANY = 100_000
"""The least number of frozen objects at which objects frozen by the user are searched: torch makes
250,000."""

FULL_EVERY = 10
"""The number of collections, and of tests, of which one is full, as for CPython's generations."""

YOUNG = 1 if sys.version_info < (3, 14) else 0
"""The generation to collect so that surviving objects move to the oldest generation.

Since 3.14 there is no middle generation: collecting it collects a part of the oldest.
"""

SPARE = 2_000_000
"""The number of container objects at which CPython collects anyway, to save host memory."""


class Collector:
    """The garbage collector, run when the blocks of a simulated or dry GPU have grown."""

    def __init__(self) -> None:
        self._collections = 0
        self._tests = 0

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Prevent other automatic collections inside; explicit calls still collect.

        If the user has turned the collector off, it stays off.
        """
        found = get_threshold()
        if not found[0]:
            yield
            return
        held = (SPARE, *found[1:])
        set_threshold(*held)
        try:
            yield
        finally:
            if get_threshold() == held:
                set_threshold(*found)
                self._tests += 1
                if self._tests % FULL_EVERY == 0:
                    # CPython checks its thresholds when an object is made, and may then collect
                    # the oldest generation. The counter of that is near zero, because this class
                    # has collected the young ones.
                    set_threshold(1, *found[1:])
                    _ = [[], [], []]
                    set_threshold(*found)

    def restart(self) -> None:
        """Reset the state as if no code had run before."""
        collect_young()
        self._collections = 0

    def grown(self) -> None:
        """Free garbage among new objects after a GPU has gained :data:`GROWTH` blocks."""
        if isenabled() and get_threshold()[0]:
            self._collections += 1
            collect(2 if self._collections % FULL_EVERY == 0 else YOUNG)


def collect_young() -> None:
    """Free garbage among new objects, move the rest to the oldest generation, reset the counters.

    Does nothing if the collector is off, as then it never runs.
    """
    if isenabled() and get_threshold()[0]:
        collect(YOUNG)


def collect_garbage() -> None:
    """Free all garbage; with torch loaded that takes a tenth of a second."""
    collect()


@contextmanager
def without_old_garbage() -> Iterator[None]:
    """Restrict a collection inside to objects that became garbage inside.

    If the user has frozen objects, it frees all garbage, because thawing would thaw theirs, too.
    """
    if get_freeze_count():
        collect()
        yield
        return
    freeze()
    try:
        yield
    finally:
        unfreeze()


@contextmanager
def settings_restored() -> Iterator[None]:
    """Restore the collector's settings that code inside changes."""
    enabled, thresholds = isenabled(), get_threshold()
    try:
        yield
    finally:
        set_threshold(*thresholds)
        (enable if enabled else disable)()


@contextmanager
def paused() -> Iterator[None]:
    """Pause automatic garbage collection inside; explicit calls still collect.

    Reading a large document makes only live objects, and half of the time would be spent on
    scanning them repeatedly.
    """
    enabled = isenabled()
    disable()
    try:
        yield
    finally:
        if enabled:
            enable()


@contextmanager
def importing() -> Iterator[None]:
    """Pause automatic collection inside, then move all objects to the oldest generation.

    An import leaves hardly any garbage, and a pass over torch's objects takes a tenth of a second.
    If the user has frozen objects, which would be thawed, too, new objects stay young.
    """
    with paused():
        yield
        if get_count()[0] > MANY and not get_freeze_count():
            freeze()
            unfreeze()


class FramesCleared:
    """A context that clears the frames which code inside the ``with`` statement leaves behind.

    A frame object that outlives its function refers to all its callers' frames (``f_back``), and so
    keeps their local variables alive until the collector runs, or forever. Two kinds of code leave
    such frames behind: a function with its own frame in a local variable (``wrap`` in
    torch/fx/_symbolic_trace.py), and an exception that is stored or part of a reference cycle
    (``FailedMatch`` in torch/_inductor/pattern_matcher.py). This removes the tracebacks of the
    exceptions and the local variables of the frames, unless an exception leaves the ``with``
    statement. It is also two calls, for callbacks that another library's function makes.

    The search among all objects is slow, so it is made only if the innermost frame that has run
    since the beginning has more references than before, of which ``f_back`` is one.
    """

    def __init__(self) -> None:
        self._before: list[FrameType] = []
        self._references: list[int] = []
        self._collections = 0

    def begin(self) -> None:
        """Record the running frames."""
        self._collections = get_stats()[-1]["collections"]
        self._before = list(_running())
        self._references = [getrefcount(frame) for frame in self._before]

    def end(self) -> None:
        """Clear the frames left below the innermost recorded frame that still runs.

        Does nothing without a preceding :meth:`begin`: for captures of CUDA graphs, torch calls
        only the callback at the end.
        """
        references = [getrefcount(frame) for frame in self._before]
        running = set(_running())
        for frame, now, then in zip(self._before, references, self._references, strict=True):
            if frame in running:
                if now > then:
                    is_young = get_stats()[-1]["collections"] == self._collections
                    _clear_frames_below(frame, _NEW if is_young else (*_NEW, _OLDEST))
                break
        self._before.clear()
        self._references.clear()

    __enter__ = begin

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.end()


def _running() -> Iterator[FrameType]:
    """Yield the frames of the caller's callers, innermost first, except for generators."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_flags & CO_GENERATOR:
            yield frame
        frame = frame.f_back


def _clear_frames_below(caller: FrameType, generations: Sequence[int]) -> None:
    """Clear the frames that were left below ``caller``, and the tracebacks that refer to them."""
    left: list[FrameType] = []
    for each in chain.from_iterable(map(get_objects, generations)):
        # type() is needed: proxies report the class of the object that they stand for.
        kind = type(each)
        if kind is FrameType:
            if _is_below(each, caller):
                left.append(each)
        elif issubclass(kind, BaseException):
            traceback = each.__traceback__
            if traceback is not None and _is_below(traceback.tb_frame, caller):
                each.__traceback__ = None
    for frame in left:
        with suppress(RuntimeError):  # it is running in another thread
            frame.clear()


def _is_below(frame: FrameType, caller: FrameType) -> bool:
    following = frame.f_back
    while following is not None:
        if following is caller:
            return True
        following = following.f_back
    return False


@contextmanager
def clear_frames_of_imports() -> Iterator[None]:
    """Clear the frames that an import inside leaves behind, at the end of the import.

    Such frames keep local variables of the test alive, but only in the test that imports the module
    first, which would then need more memory than later: the first
    ``torch.utils.checkpoint.checkpoint`` of a process imports ``torch._dynamo`` while its input is
    a local variable (``inner`` in torch/_compile.py).
    """
    busy: set[int] = set()
    """Threads that run an import; nested imports are cleared by the outermost one."""

    def wrapper_of(name: str) -> Callable[[Loader], Loader] | None:
        return None if is_find_spec() else partial(_TidyLoader, busy)

    with watched(Finder(wrapper_of, busy)):
        yield


class _TidyLoader(Wrapped):
    def __init__(self, busy: set[int], loader: Loader) -> None:
        super().__init__(loader)
        self._busy = busy

    def exec_module(self, module: ModuleType) -> None:
        thread = get_ident()
        self._busy.add(thread)
        try:
            with FramesCleared():
                super().exec_module(module)
        finally:
            self._busy.discard(thread)
