"""Operators that compute: kernels for ``meta``, and the rules of CUDA's allocations beside."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.simulated.common.nesting import tensors_in
from pytest_gpumem.simulated.execution.elements import run_by_kinds
from pytest_gpumem.simulated.execution.runner import CUDA, HOST, Runner
from pytest_gpumem.simulated.execution.shapes import NEW, is_of_lists
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import sparse, sparse_products, tables
from pytest_gpumem.simulated.operators.rules import BoundRule, Call, on_machine

_SPARSE_PARTS = {**sparse.PARTS, **sparse_products.PARTS}


def computing(runner: Runner, func: Any) -> Handler:
    """Return the handler of an operator that is of no other kind."""
    return of_rule(runner, func, tables.rule_of(func), resizes=may_resize(func))


def may_resize(func: Any) -> bool:
    """Return whether ``func`` may change the size of an existing storage."""
    schema = func._schema
    return "out" in schema.overload_name or "resize" in schema.name or "set_" in schema.name


def of_rule(runner: Runner, func: Any, rule: BoundRule | None, *, resizes: bool) -> Handler:
    """Return a handler of ``func`` that also allocates as ``rule`` describes beside the outputs."""
    machine = runner.machine
    adopt = runner.adopt
    shapes = runner.shapes
    storages = runner.storages
    fresh = not any(r.alias_info is not None for r in func._schema.returns)
    is_placed = rule is not None and rule.placed is not None
    is_shaped = rule is not None and rule.shapes is not None and not resizes
    operator = Operator.of(func)
    follow = runner.values.follow
    run = runner.run_seeded
    placement = machine.placement
    name = func._schema.name
    is_checked = not resizes or "out" in func._schema.overload_name
    overload = str(func)
    parts = _SPARSE_PARTS.get(overload)
    takes_lists = is_of_lists(func)
    in_parts = None if parts is None else on_machine(parts, func, machine)

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = machine.current if placement is None else placement.of(name, args, kwargs)
        if machine.has_real_meta or storages.on_host or rule is not None:
            owner = runner.owner(args, kwargs)
            if owner is None:
                return runner.run_elsewhere(func, args, kwargs)
            if owner == HOST:
                return runner.run_on_host(operator, args, kwargs)
        key, make = (None, NEW) if resizes else shapes.find(func, args, kwargs)
        if (
            in_parts is not None
            and make is NEW
            and sparse.is_in_parts(overload, args)
            and runner.owner(args, kwargs) == CUDA
        ):
            with runner.mode:
                return in_parts(*args, **kwargs)
        if make is NEW and is_checked and runner.is_elsewhere(func, args, kwargs):
            return runner.run_elsewhere(func, args, kwargs)
        call = None if rule is None else Call(rule, device, args, kwargs)
        if make is NEW or make is None:
            try:
                if call is not None and is_shaped:
                    result = call.shapes()
                elif takes_lists and key is not None:
                    result = run_by_kinds(run, key, args, kwargs)
                else:
                    result = run(func, args, kwargs)
            except BaseException:
                if call is not None:
                    call.abandon()
                raise
            if make is NEW and key is not None:
                shapes.learn(key, args, kwargs, result)
        else:
            result = make(args)
        if fresh or resizes:
            if call is None or not is_placed:
                adopt(result, device)
            else:
                adopt(call.placed(result), device)
                storages.adopt_numbers(tensors_in(result))
        if resizes:
            for tensor in tensors_in((args, kwargs)):
                storages.resized(tensor)
        if call is not None:
            call.end(result)
        follow(operator, args, kwargs, result)
        return result

    return handle


def each_device(runner: Runner, func: Any, handler: Handler) -> Handler:
    """Run ``func``, of lists of tensors, on one GPU after the other where there are several."""
    placement = runner.machine.placement
    return handler if placement is None else placement.each(handler)
