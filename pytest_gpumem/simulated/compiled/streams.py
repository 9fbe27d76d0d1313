"""Streams and events that compiled code makes, which are not followed.

Dynamo makes them while it traces, of torch's own classes, and keeps them for the code that it
writes. Those need a driver.

Source: torch/_dynamo/variables/user_defined.py and streams.py, torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch

from pytest_gpumem.simulated.compiled.refusals import CompiledCodeError

_OWN: tuple[type, ...] = torch.cuda.streams.Stream, torch.cuda.streams.Event
"""torch's own classes, whose names may be replaced."""


@contextmanager
def refused() -> Iterator[list[str]]:
    """Refuse to make any inside; the value has the reason, as torch wraps errors by release."""
    refusals: list[str] = []

    def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
        refusals.append(f"it makes a torch.cuda.{cls.__name__}")
        raise CompiledCodeError(refusals[-1])

    with ExitStack() as inside:
        for owner in _OWN:
            inside.enter_context(mock.patch.object(owner, "__new__", refuse))
        yield refusals
