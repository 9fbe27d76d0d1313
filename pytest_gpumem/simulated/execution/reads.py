"""Operators that read values on the host: ``item()``, ``equal``, ``allclose``."""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.simulated.execution.runner import Runner
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import comparisons
from pytest_gpumem.values.errors import UnknownValueError

_NEUTRAL = frozenset({torch.ops.aten._local_scalar_dense.default})


_READS = frozenset(
    {"aten::_local_scalar_dense", "aten::equal", "aten::allclose", "aten::is_nonzero"}
)


def is_read(func: Any) -> bool:
    """Return whether ``func`` yields a number of Python."""
    return func._schema.name in _READS


def read(runner: Runner, func: Any) -> Handler:
    """Return a handler that gives the known value, else a neutral one, else an error."""
    machine = runner.machine
    operator = Operator.of(func)
    parts = comparisons.PARTS.get(func._schema.name)

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if runner.owner(args, kwargs) is None:
            return runner.run_elsewhere(func, args, kwargs)
        machine.streams.host_waits(machine.current_index)
        value = runner.values.computed(operator, args, kwargs)
        if value is None and func in _NEUTRAL:
            value = machine.neutral_value(args[0])
        if value is None:
            raise UnknownValueError(runner.unknown(func))
        if parts is not None:
            with runner.mode, runner.values.ignoring():
                parts(*args, **kwargs)
        return value

    return handle
