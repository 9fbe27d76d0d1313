"""Operators that are built from others: taken apart in view of the mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from pytest_gpumem.simulated.common.callsite import running, user_line
from pytest_gpumem.simulated.execution import computing
from pytest_gpumem.simulated.execution.runner import CUDA, Runner
from pytest_gpumem.simulated.machine.signatures import Args, Handler, Kwargs
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import tables
from pytest_gpumem.simulated.operators.rules import on_machine
from pytest_gpumem.values.errors import UnsupportedOperatorError

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key


def is_composite(func: Any) -> bool:
    """Return whether torch builds ``func`` from other operators on every device."""
    # Some have a kernel of their own besides, on CUDA and on meta alike: silu_backward.
    return func.has_kernel_for_dispatch_key(_COMPOSITE) and not _has_kernel(func.name(), "Meta")


def composite(runner: Runner, func: Any) -> Handler:
    """Return a handler that runs ``func`` as CUDA's parts, else as torch's decomposition."""
    implementation = tables.COMPOSITES.get(str(func))
    if implementation is None:
        return of_parts(runner, func.decompose)
    return of_parts(runner, _named(func, on_machine(implementation, func, runner.machine)))


def _named(func: Any, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``implementation`` with what its parts allocate as of ``func``."""

    def named(*args: Any, **kwargs: Any) -> Any:
        with running.in_parts(func):
            return implementation(*args, **kwargs)

    return named


def in_view(runner: Runner, func: Any) -> Handler:
    """Return a handler of an operator that autograd sees whole and CUDA builds from others."""
    parts = of_parts(
        runner, _named(func, on_machine(tables.IN_VIEW[str(func)], func, runner.machine))
    )
    elsewhere = computing.of_rule(runner, func, None, resizes=False)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if runner.owner(args, kwargs) != CUDA:
            return elsewhere(args, kwargs)
        runner.is_elsewhere(func, args, kwargs)
        return parts(args, kwargs)

    return whole(runner, func, handle)


_WITH_RANDOM_STATE = frozenset({"graphsafe_run_with_rng_state"})
"""Compiled code's way to recompute an operator with the same random numbers, which allocates
nothing else (torch/_prims/rng_prims.py)."""


def higher_order(runner: Runner, func: HigherOrderOperator) -> Handler:
    """Return a handler of control flow, and of other operators that take functions."""
    if func.name() in _UNSEEN:
        return of_parts(runner, _UNSEEN[func.name()])
    if func.name() in _WITH_RANDOM_STATE:
        return of_parts(
            runner, lambda operator, *args, rng_state, **kwargs: operator(*args, **kwargs)
        )
    # It runs this where nothing compiles it; random operators of DTensor have one only for CUDA.
    keys = torch._C.DispatchKey.CompositeExplicitAutograd, torch._C.DispatchKey.CUDA
    eagerly = next((func.py_kernels[key] for key in keys if key in func.py_kernels), None)
    if eagerly is not None:
        return of_parts(runner, eagerly)

    def refuse(args: Args, kwargs: Kwargs) -> Any:
        raise UnsupportedOperatorError(
            f"{func.name()} at {user_line()} is for compiled code, so it cannot run on a "
            f"simulated GPU"
        )

    return refuse


def of_parts(runner: Runner, implementation: Callable[..., Any]) -> Handler:
    """Run ``implementation``, and each operator in it for itself."""

    def handle(args: Args, kwargs: Kwargs) -> Any:
        # Under inference_mode composite operators arrive whole: take them apart in view.
        with runner.mode:
            return implementation(*args, **kwargs)

    return followed(runner, handle)


def followed(runner: Runner, handler: Handler) -> Handler:
    """Note where an operator runs whose tensors may be on several GPUs."""
    placement = runner.machine.placement
    return handler if placement is None else placement.following(handler)


def whole(runner: Runner, func: Any, handler: Handler) -> Handler:
    """Return a handler that keeps shapes of ``handler``'s parts and computes values of ``func``."""
    operator = Operator.of(func)
    values = runner.values

    def handle(args: Args, kwargs: Kwargs) -> Any:
        with values.ignoring():
            result = handler(args, kwargs)
        values.replace(operator, args, kwargs, result)
        return result

    return handle


def _scan(combine: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    from torch._higher_order_ops.scan import generic_scan

    return generic_scan(combine, init, xs, additional_inputs=additional_inputs)


_UNSEEN: dict[str, Callable[..., Any]] = {
    "cond": lambda condition, if_true, if_false, operands=(): (if_true if condition else if_false)(
        *operands
    ),
    "scan": _scan,
    "invoke_subgraph": lambda subgraph, _, *operands: (
        subgraph(list(operands)) if getattr(subgraph, "_boxed_call", False) else subgraph(*operands)
    ),
}
"""Replacements of torch's code for these operators, which runs only without a mode.

Source: torch/_higher_order_ops/cond.py (cond_op_dense), scan.py (scan_op_dense) and
invoke_subgraph.py, torch 2.11 and 2.13.
"""
