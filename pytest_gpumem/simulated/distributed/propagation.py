"""DTensor's sharding propagation: worked out once for parameters of a kind.

An optimizer's ``_foreach_`` operators take lists of all parameters. torch works the sharding of
each element out by itself, in a time that grows with the square of their number; layers are alike,
and equal elements have equal answers.

Source: torch/distributed/tensor/_sharding_prop.py (``propagate_op_sharding_non_cached``, the branch
of ``TupleStrategy``), torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from pytest_gpumem.simulated.common.patching import Patches

_NAME = "propagate_op_sharding_non_cached"
_OF_LISTS = "aten::_foreach_"


def add_patches(patches: Patches) -> None:
    """Compute the sharding of a list's elements once for equal ones."""
    patches.add(ShardingPropagator, _NAME, _once_for_equal(vars(ShardingPropagator)[_NAME]))


def _once_for_equal(propagate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(propagate)
    def call(propagator: Any, schema: OpSchema) -> Any:
        if not schema.op._schema.name.startswith(_OF_LISTS):
            return propagate(propagator, schema)
        lists: list[Any] = [arg for arg in schema.args_schema if _is_list(arg)]
        of_tensors = [arg for arg in lists if arg and isinstance(arg[0], DTensorSpec)]
        elements = list(zip(*of_tensors, strict=True))
        kinds = {element: kind for kind, element in enumerate(dict.fromkeys(elements))}
        if len(kinds) == len(elements):
            return propagate(propagator, schema)
        first = [elements.index(element) for element in kinds]
        found = propagate(propagator, _with(schema, len(elements), first))
        kind_of = [kinds[element] for element in elements]
        output, redistributed = found.output_spec, found.redistribute_schema
        if _is_list(output):
            found = replace(found, output_spec=_chosen(output, kind_of))
        if redistributed is not None:
            again = _with(redistributed, len(kinds), kind_of)
            found = replace(found, redistribute_schema=again)
        return found

    return call


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _with(schema: OpSchema, length: int, positions: Sequence[int]) -> OpSchema:
    """Return the call with the elements at ``positions`` of its lists of this ``length``."""
    args = tuple(
        _chosen(arg, positions) if _is_list(arg) and len(arg) == length else arg  # type: ignore[arg-type]  # a list
        for arg in schema.args_schema
    )
    return OpSchema(schema.op, args, schema.kwargs_schema, schema.schema_info)


def _chosen(values: Any, positions: Sequence[int]) -> Any:
    return type(values)([values[position] for position in positions])
