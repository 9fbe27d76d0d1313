"""Who is told that a stand-in was used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytest_gpumem.simulated.stand_ins.libraries import LIBRARIES

_listeners: list[Callable[[str], None]] = []
"""Of the active simulations, innermost last: what is imported is the process's."""


@contextmanager
def telling(note: Callable[[str], None]) -> Iterator[None]:
    """Let ``note`` take the sentence of each library that is used inside."""
    _listeners.append(note)
    try:
        yield
    finally:
        _listeners.remove(note)


def used(library: str) -> None:
    """Say that a stand-in of ``library`` has allocated something."""
    if _listeners:
        _listeners[-1](LIBRARIES[library].sentence)
