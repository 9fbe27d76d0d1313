"""Compiled code that cannot be followed: it runs eagerly with a note, or is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.compiled_notes import (
    OF_COMPILED_CODE,
    RUNS_EAGERLY,
    ran_eagerly,
)
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


class CompiledCodeError(RuntimeError):
    """An error for compiled code that cannot be followed, if all of it must be."""


def note_at_line(machine: SimulatedMachine, predicate: str) -> None:
    """Note how the compiled code that the user's line calls runs."""
    sentence = f"{OF_COMPILED_CODE} {user_line()} {predicate}"
    machine.note(sentence, always=ran_eagerly(sentence))


def tell_of_compiled_code(notes: Iterable[str]) -> bool:
    """Return whether ``notes`` are of a run whose compiled code was not followed."""
    return any(note.startswith(OF_COMPILED_CODE) for note in notes)


def not_followed(machine: SimulatedMachine, error: Exception, *, refuses: bool) -> None:
    """Note that compiled code runs eagerly because of ``error``.

    Raises :class:`CompiledCodeError` instead if ``refuses``.
    """
    what = "could not be followed on a simulated GPU"
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    if refuses:
        raise CompiledCodeError(f"{OF_COMPILED_CODE} {user_line()} {what}: {first}") from error
    note_at_line(
        machine,
        f"{what}, so it {RUNS_EAGERLY}; the number is eager code's, and compiled code may allocate "
        f"less: {first}",
    )


_OWN: tuple[type, ...] = torch.cuda.streams.Stream, torch.cuda.streams.Event
"""torch's own classes, whose names may be replaced."""


@contextmanager
def streams_refused() -> Iterator[list[str]]:
    """Refuse streams and events that compiled code makes inside, which are not followed.

    Dynamo makes them while it traces, of torch's own classes, which need a driver, and keeps them
    for the code that it writes. The value has the reasons, as torch wraps errors by release.
    Source: torch/_dynamo/variables/user_defined.py and streams.py, torch 2.11 to 2.15.
    """
    refusals: list[str] = []

    def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
        refusals.append(f"it makes a torch.cuda.{cls.__name__}")
        raise CompiledCodeError(refusals[-1])

    with ExitStack() as inside:
        for owner in _OWN:
            inside.enter_context(mock.patch.object(owner, "__new__", refuse))
        yield refusals
