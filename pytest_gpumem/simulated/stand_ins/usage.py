"""Who is told that a stand-in was used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from pytest_gpumem.simulated.stand_ins.libraries import LIBRARIES

_T = TypeVar("_T")
Kept = dict[str, Any]

_listeners: list[tuple[Callable[[str], None], Kept]] = []
"""Of the active simulations, innermost last: what is imported is the process's."""


@contextmanager
def telling(note: Callable[[str], None], kept: Kept) -> Iterator[None]:
    """Let ``note`` take the sentence of each library that is used inside.

    ``kept`` is for what a library keeps until its process ends.
    """
    _listeners.append((note, kept))
    try:
        yield
    finally:
        _listeners.pop()


def used(library: str) -> None:
    """Say that a stand-in of ``library`` has allocated something."""
    tell(LIBRARIES[library].sentence)


def tell(sentence: str) -> None:
    """Say something to whoever reads the numbers."""
    if _listeners:
        _listeners[-1][0](sentence)


@runtime_checkable
class Tidy(Protocol):
    """What a library keeps, and does not need all of any more."""

    def tidy(self) -> None:
        """Drop what belongs to what is gone."""


def forget_caches() -> None:
    """Drop tensors that libraries keep and make anew: workspaces, masks, lengths of sequences.

    So a test is charged for its own, as for the workspaces of cuBLAS, in whatever order they run.
    """
    kept = _listeners[-1][1] if _listeners else {}
    for name, value in list(kept.items()):
        if isinstance(value, torch.Tensor):
            del kept[name]
        elif isinstance(value, Tidy):
            value.tidy()


def kept_values() -> list[Any]:
    """What libraries keep until their process ends: nobody leaks it."""
    return list(_listeners[-1][1].values()) if _listeners else []


def keeping(name: str, make: Callable[[], _T]) -> _T:
    """Return what a library makes once in a process: here, once in a simulation."""
    kept = _listeners[-1][1] if _listeners else {}
    if name not in kept:
        kept[name] = make()
    made: _T = kept[name]
    return made
