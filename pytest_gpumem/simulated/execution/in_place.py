"""Operators that autograd's formulas apply to a temporary, which C++ does in place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.operators.engine import (
    ACCUMULATED,
    IN_PLACE,
    in_formula,
    with_cuda_sums,
)


def may_be_in_place(func: Any) -> bool:
    """Return whether some formula calls ``func`` otherwise on a GPU: in place, or for a type."""
    return str(func) in IN_PLACE or str(func) in ACCUMULATED


def in_place(
    func: Any, handler: Handler, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
) -> Handler:
    """Return a handler that runs the in-place operator where such a formula calls ``func``."""
    if str(func) in ACCUMULATED:

        def handle_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if in_formula(sys._getframe(2)):
                node = torch._C._current_autograd_node().name()
                kwargs = with_cuda_sums(args[0], kwargs, node)
            return handler(args, kwargs)

        return handle_sum
    chosen = IN_PLACE[str(func)]

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Two frames up is the operator's caller.
        if in_formula(sys._getframe(2)):
            node = torch._C._current_autograd_node()
            operator = chosen(args, node.name())
            if operator is not None:
                return run(operator, args, kwargs)
        return handler(args, kwargs)

    return handle
