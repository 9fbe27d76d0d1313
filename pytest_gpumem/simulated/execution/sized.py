"""Operators whose results' sizes depend on their arguments' values."""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.simulated.common.raw import META, tensors_in
from pytest_gpumem.simulated.execution.runner import CUDA, DATA_DEPENDENT, Runner
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import tables
from pytest_gpumem.simulated.operators.rules import Call

_empty_strided = torch.empty_strided


def is_sized_by_values(func: Any) -> bool:
    """Return whether values decide how large the results of ``func`` are, which it makes itself."""
    return bool(DATA_DEPENDENT & set(func.tags)) and "out" not in func._schema.overload_name


def sized(runner: Runner, func: Any, otherwise: Handler) -> Handler:
    """Return a handler of ``func`` by its values; ``otherwise`` runs it where they are unknown."""
    rule = tables.rule_of(func)
    operator = Operator.of(func)
    machine = runner.machine
    placement = machine.placement
    name = func._schema.name

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        computed = None
        if runner.owner(args, kwargs) == CUDA:
            computed = runner.values.computed(operator, args, kwargs)
        if computed is None:
            return otherwise(args, kwargs)
        runner.is_elsewhere(func, args, kwargs)
        device = machine.current if placement is None else placement.of(name, args, kwargs)
        call = None if rule is None else Call(rule, device, args, kwargs)
        result = _shaped_as(func, computed)
        runner.adopt(result if call is None else call.placed(result), device)
        if call is not None:
            call.end(result)
        for tensor, values in zip(tensors_in(result), tensors_in(computed), strict=True):
            runner.values.keep(tensor, values)
        return result

    return handle


def _shaped_as(func: Any, computed: Any) -> Any:
    """Return meta tensors with the sizes of ``computed`` and the strides CUDA gives them."""
    if isinstance(computed, torch.Tensor):
        strides = computed.stride()
        if func is torch.ops.aten.nonzero.default:
            # aten/src/ATen/native/cuda/Nonzero.cu writes one row for each dimension.
            strides = (1, max(computed.shape[0], 1))
        return _empty_strided(computed.shape, strides, dtype=computed.dtype, device=META)
    return type(computed)(_shaped_as(func, item) for item in computed)
