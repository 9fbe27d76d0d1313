"""Python's garbage collector while a test is measured.

CPython collects the youngest generation when 700 more container objects have been made than freed
(``_PyObject_GC_Link`` and the default thresholds in Modules/gcmodule.c up to 3.11 and Python/gc.c
since). Imports and caches that only the first test of a process fills count too, and so do the
objects of earlier tests. Tensors in cycles of references, which only the collector frees,
would make a test's peak depend on the tests that run before it.

So a measured body begins with an empty young generation. On a simulated or dry GPU, moreover, the
collector runs by CPython's rule applied to the GPU's blocks: when there are 700 more of them than
after the last collection. CPython's own rule runs only at :data:`SPARE` objects, and once behind
every tenth test (:data:`FULL_EVERY`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Imported by name, because code under test may replace the module's functions.
from gc import (
    collect,
    disable,
    enable,
    freeze,
    get_freeze_count,
    get_threshold,
    isenabled,
    set_threshold,
    unfreeze,
)

GROWTH = 700
"""The growth in blocks of one GPU that triggers a collection; CPython's number of objects."""

FULL_EVERY = 10
"""The number of collections, and of tests, of which one is full, as for CPython's generations."""

YOUNG = 1 if sys.version_info < (3, 14) else 0
"""The generation whose collection leaves everything that it finds in use among the oldest.

Since 3.14 there is no middle generation, and collecting it collects a part of the oldest.
"""

SPARE = 2_000_000
"""The number of container objects at which CPython collects anyway, to save host memory."""


class Collector:
    """A runner of the collector when a simulated or dry GPU has grown."""

    def __init__(self) -> None:
        self._collections = 0
        self._tests = 0

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Prevent other collections inside, except those that code calls explicitly.

        Where the user has turned it off it stays off.
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
                    # CPython checks its thresholds when an object is made, and may collect the
                    # oldest generation then. Young ones were collected in its place, so its own
                    # counter is near zero.
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
    """Free garbage among new objects, move the others to the oldest generation, count from zero.

    Does nothing where the collector is off: it cannot run at any time then.
    """
    if isenabled() and get_threshold()[0]:
        collect(YOUNG)


def collect_garbage() -> None:
    """Free all garbage; with torch loaded that takes a tenth of a second."""
    collect()


@contextmanager
def without_old_garbage() -> Iterator[None]:
    """Restrict a collection inside to objects that became garbage inside.

    Where the user has frozen objects it frees all garbage: they would be thawed with the others.
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
