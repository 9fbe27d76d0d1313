"""The kinds of operator, and which of them an operator is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pytest_gpumem.simulated.execution import (
    composites,
    computing,
    copies,
    factories,
    masks,
    pinning,
    reads,
    refused,
    sized,
    views,
)
from pytest_gpumem.simulated.execution.runner import Runner
from pytest_gpumem.simulated.execution.shapes import is_of_lists
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.operators import tables


class Kind(NamedTuple):
    """Operators that one handler can run."""

    takes: Callable[[Any], bool]
    """Whether an operator is of this kind, given that it is of none above."""
    handler: Callable[[Runner, Any], Handler]


KINDS = (
    Kind(composites.is_composite, composites.composite),
    Kind(lambda func: str(func) in tables.IN_VIEW, composites.in_view),
    Kind(composites.is_move, composites.move),
    Kind(reads.is_read, reads.read),
    Kind(refused.quantizes, refused.quantize),
    Kind(lambda func: func._schema.name == "aten::scalar_tensor", factories.scalar),
    Kind(pinning.is_pinning, pinning.pinning),
    Kind(factories.is_factory, factories.factory),
    Kind(lambda func: func._schema.name == "aten::copy_", copies.copy),
    Kind(views.makes_views, views.views),
)
"""The kinds of operators: the first that takes one runs it; by default it computes."""


class Special(NamedTuple):
    """Operators that compute, of which some calls go another way."""

    takes: Callable[[Any], bool]
    handler: Callable[[Runner, Any, Handler], Handler]
    """A function that gets the handler of the other calls."""


SPECIAL = (
    Special(sized.is_sized_by_values, sized.sized),
    Special(masks.takes_masks, masks.masked),
    Special(masks.is_selection, masks.selected),
    Special(is_of_lists, computing.each_device),
)
"""All such kinds, from the inside out."""


def handler_of(runner: Runner, func: Any) -> Handler:
    """Return the handler of the operator ``func``."""
    for kind in KINDS:
        if kind.takes(func):
            return kind.handler(runner, func)
    handler = computing.computing(runner, func)
    for special in SPECIAL:
        if special.takes(func):
            handler = special.handler(runner, func, handler)
    return handler
