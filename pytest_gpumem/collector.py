"""Python's garbage collector while a test is measured.

CPython collects the youngest generation when 700 more container objects have been made than freed
(``_PyObject_GC_Link`` and the default thresholds in Modules/gcmodule.c up to 3.11 and Python/gc.c
since). Imports and caches that only the first test of a process fills count too, and so do the
objects of whoever ran before. Tensors in cycles of references, which only the collector frees,
would make a test's peak depend on its company.

So a measured body begins with an empty young generation. On a simulated GPU, moreover, the
collector runs by CPython's rule applied to what the GPU has: when there are 700 more blocks than
after the last collection.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Here, because code under test may replace what the module has.
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
"""Blocks of one GPU that make a collection due; CPython's number of container objects."""

FULL_EVERY = 10
"""Every tenth collection is a full one, as CPython's thresholds of older generations say."""

YOUNG = 1 if sys.version_info < (3, 14) else 0
"""The generation whose collection leaves everything that it finds in use among the oldest.

Since 3.14 there is no middle generation, and asking for it collects a part of the oldest.
"""

SPARE = 2_000_000
"""Container objects after which CPython collects all the same, for the memory of the host."""


class Collector:
    """Runs the collector when a simulated GPU has grown, and at no other moment."""

    def __init__(self) -> None:
        self._collections = 0

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Let nobody else run the collector inside, but for code that asks for it.

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
                _give_python_a_turn()

    def restart(self) -> None:
        """Begin as if nothing had run before."""
        collect_young()
        self._collections = 0

    def grown(self) -> None:
        """A GPU has :data:`GROWTH` blocks more: free what is garbage among the new objects."""
        if isenabled() and get_threshold()[0]:
            self._collections += 1
            collect(2 if self._collections % FULL_EVERY == 0 else YOUNG)


def collect_young() -> None:
    """Free what is garbage among new objects, let the others be old ones, and count from zero.

    Does nothing where the collector is off: no moment of it can make a difference then.
    """
    if isenabled() and get_threshold()[0]:
        collect(YOUNG)


def collect_garbage() -> None:
    """Free all garbage; with torch loaded that takes a tenth of a second."""
    collect()


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Let a collection inside free only what became garbage inside.

    Where the user has frozen objects it frees all: they would be thawed with the others.
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
def settings_kept() -> Iterator[None]:
    """Put back what code inside sets the collector to: it was meant for itself."""
    enabled, thresholds = isenabled(), get_threshold()
    try:
        yield
    finally:
        set_threshold(*thresholds)
        (enable if enabled else disable)()


def _give_python_a_turn() -> None:
    """Let CPython see what is due, which may be the oldest generation; it looks when one is made.

    Young ones have been collected for it meanwhile, so that its own counter stands near zero.
    """
    thresholds = get_threshold()
    set_threshold(1, *thresholds[1:])
    _ = [[], [], []]
    set_threshold(*thresholds)
