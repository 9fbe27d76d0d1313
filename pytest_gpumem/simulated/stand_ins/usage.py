"""Reports to the active simulation that the stand-in was used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytest_gpumem.simulated.stand_ins.libraries import FLASH_ATTN

_listeners: list[Callable[[str], None]] = []
"""Listeners of the active simulations, innermost last: imports are the process's."""


@contextmanager
def telling(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note`` with a sentence when the stand-in is used inside."""
    _listeners.append(note)
    try:
        yield
    finally:
        _listeners.pop()


def used() -> None:
    """Report that the stand-in has allocated something."""
    if _listeners:
        _listeners[-1](FLASH_ATTN.sentence)
