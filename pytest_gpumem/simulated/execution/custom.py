"""Operators of other libraries: a description stands for those that have one."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.simulated.execution.composites import whole
from pytest_gpumem.simulated.execution.runner import TORCHS_OWN, Runner
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.operators.described import DESCRIPTIONS, checked_outputs, on_gpu


def is_custom(func: Any) -> bool:
    """Whether ``func`` is none of torch's own."""
    return func.namespace not in TORCHS_OWN


def custom(runner: Runner, func: Any, undescribed: Handler) -> Handler:
    """``func``, as somebody has described it; ``undescribed`` runs it where nobody has."""
    schema = func._schema

    def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        description = DESCRIPTIONS.of(schema.name, schema.overload_name)
        assert description is not None
        with runner.mode:
            return checked_outputs(schema, description(*args, **kwargs))

    described = whole(runner, func, describe)

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        description = DESCRIPTIONS.of(schema.name, schema.overload_name)
        if description is None or not on_gpu(args, kwargs):
            return undescribed(args, kwargs)
        return described(args, kwargs)

    return handle
