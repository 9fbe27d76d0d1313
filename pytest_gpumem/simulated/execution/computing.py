"""Operators that compute: kernels for ``meta``, and the rules of CUDA's allocations beside.

Operators of lists, run on one element of each kind: equal elements have equal results.

An optimizer hands all its parameters to one operator. For ``meta`` torch takes the slow route of
aten/src/ATen/native/ForeachOpsKernels.cpp, one element after the other, most of them by kernels in
Python; a model of many equal layers has few kinds of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.execution.runner import CUDA, HOST, Runner
from pytest_gpumem.simulated.execution.shapes import (
    NEW,
    UnknownError,
    is_of_lists,
    recipe,
    storages_in,
)
from pytest_gpumem.simulated.machine.signatures import Args, Handler, Kwargs
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import sparse
from pytest_gpumem.simulated.operators.rules import BoundRule, Call, on_machine


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
    parts = sparse.PARTS.get(overload)
    takes_lists = is_of_lists(func)
    in_parts = None if parts is None else on_machine(parts, func, machine)

    def handle(args: Args, kwargs: Kwargs) -> Any:
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


def run_by_kinds(
    run: Callable[[Any, Args, Kwargs], Any], key: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Run an operator of lists with ``run``; ``Shapes.find`` described its arguments as ``key``."""
    func, _, described, _ = key
    lists = [place for place, arg in enumerate(args) if isinstance(arg, (list, tuple))]
    kinds = _kinds(args, kwargs, lists, described)
    first: dict[Any, int] = {}
    for place, kind in enumerate(kinds):
        first.setdefault(kind, place)
    if len(first) == len(kinds):
        return run(func, args, kwargs)
    fewer = tuple(
        [arg[number] for number in first.values()] if place in lists else arg
        for place, arg in enumerate(args)
    )
    results = run(func, fewer, kwargs)
    if results is None:
        return None
    inputs = storages_in((fewer, kwargs))
    try:
        make = {
            kind: recipe(result, (), inputs) for kind, result in zip(first, results, strict=True)
        }
    except UnknownError:
        return run(func, args, kwargs)
    return [make[kind](()) for kind in kinds]


def _kinds(
    args: Args, kwargs: Kwargs, lists: list[int], described: tuple[Any, ...]
) -> list[tuple[Any, ...]]:
    """Return each element's description in all lists; empty if an argument differs by element."""
    others = (*kwargs.values(), *(arg for place, arg in enumerate(args) if place not in lists))
    if (
        not lists
        or len({len(args[place]) for place in lists}) > 1  # torch refuses them
        or any(isinstance(other, (list, tuple)) for other in kwargs.values())
        or any(isinstance(other, torch.Tensor) and other.dim() for other in others)
    ):
        return []
    return list(zip(*(described[place] for place in lists), strict=True))
