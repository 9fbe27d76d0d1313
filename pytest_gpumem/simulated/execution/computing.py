"""Handlers of operators that compute or make tensors: kernels for ``meta``, CUDA's allocations.

Factories, and copies to another device, make tensors on the device in their options.

``_foreach_`` operators run on one element of each kind: equal elements have equal results. An
optimizer passes all its parameters to one operator. For ``meta`` torch takes the slow path of
aten/src/ATen/native/ForeachOpsKernels.cpp, one element after the other, most of them by kernels in
Python; a model of many equal layers has few kinds of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import FROM_HOST, running, user_line
from pytest_gpumem.simulated.execution.runner import CUDA, HOST, Runner, laid_out
from pytest_gpumem.simulated.execution.shapes import (
    NEW,
    UnknownError,
    is_of_lists,
    recipe,
    storages_in,
)
from pytest_gpumem.simulated.machine.checks import NO_DATA
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.placement import source_of_node
from pytest_gpumem.simulated.machine.signatures import Args, Handler, Kwargs, is_out
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import sparse, tables, transfers
from pytest_gpumem.simulated.operators.layout import strides_in_cpp
from pytest_gpumem.simulated.operators.rules import BoundRule, Call, on_machine
from pytest_gpumem.values.errors import UnsupportedOperatorError


def may_resize(func: Any) -> bool:
    """Return whether ``func`` may change the size of an existing storage."""
    schema = func._schema
    return is_out(schema) or "resize" in schema.name or "set_" in schema.name


def of_rule(runner: Runner, func: Any, rule: BoundRule | None, *, resizes: bool) -> Handler:
    """Return a handler that runs ``func`` and allocates the temporaries that ``rule`` describes."""
    machine = runner.machine
    adopt = runner.track
    shapes = runner.shapes
    storages = runner.storages
    fresh = not any(r.alias_info is not None for r in func._schema.returns)
    is_placed = rule is not None and rule.outputs is not None
    is_shaped = rule is not None and rule.shapes is not None and not resizes
    operator = Operator.of(func)
    follow = runner.values.follow
    run = runner.run_seeded
    placement = machine.placement
    name = func._schema.name
    is_checked = not resizes or is_out(func._schema)
    overload = str(func)
    parts = sparse.PARTS.get(overload)
    takes_lists = is_of_lists(func)
    in_parts = None if parts is None else on_machine(parts, func, machine)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        device = machine.current if placement is None else placement.of(name, args, kwargs)
        if machine.has_real_meta or storages.unknown_on_cpu or rule is not None:
            owner = runner.device_kind_of(args, kwargs)
            if owner is None:
                return runner.run_elsewhere(func, args, kwargs)
            if owner == HOST:
                return runner.run_on_host(operator, args, kwargs)
        key, make = (None, NEW) if resizes else shapes.find(func, args, kwargs)
        if (
            in_parts is not None
            and make is NEW
            and sparse.is_in_parts(overload, args)
            and runner.device_kind_of(args, kwargs) == CUDA
        ):
            with runner.mode:
                return in_parts(*args, **kwargs)
        if make is NEW and is_checked and runner.check_placement(func, args, kwargs):
            return runner.run_elsewhere(func, args, kwargs)
        call = None if rule is None else Call(rule, device, args, kwargs)
        before = [one.shape for one in raw.tensors_in(kwargs)] if resizes else None
        if make is NEW or make is None:
            try:
                if call is not None and is_shaped:
                    result = call.shapes()
                elif takes_lists and key is not None:
                    result = run_by_kinds(run, key, args, kwargs)
                else:
                    given = args
                    on_gpu = before and all(map(raw.is_meta, raw.tensors_in(kwargs)))
                    if on_gpu and isinstance(args[0], torch.Tensor) and not args[0].dim():
                        # A number of the host would take the result there.
                        given = (args[0].to(raw.META), *args[1:])
                    result = run(func, given, kwargs)
                if fresh:
                    result = laid_out(func, args, kwargs, result)
                elif before and before != [one.shape for one in raw.tensors_in(kwargs)]:
                    strides = strides_in_cpp(func, args, kwargs, result)
                    if strides is not None:
                        result.as_strided_(result.shape, strides)
            except BaseException:
                if call is not None:
                    call.free_before()
                raise
            if make is NEW and key is not None:
                shapes.learn(key, args, kwargs, result)
        else:
            result = make(args)
        if fresh or resizes:
            if call is None or not is_placed:
                adopt(result, device)
            else:
                if resizes:
                    for one in call.outputs(result):
                        storages.resized(one)
                else:
                    adopt(call.outputs(result), device)
                storages.mark_host_scalars(raw.tensors_in(result))
        if resizes:
            for tensor in raw.tensors_in((args, kwargs)):
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


_IN_CPP = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "zeros", "ones", "full", "rand", "scalar_tensor")
)
"""Factories whose meta kernels are as fast as looking their shapes up."""


def is_factory(func: Any) -> bool:
    """Return whether ``func`` takes a device."""
    return any(argument.name == "device" for argument in func._schema.arguments)


def factory(runner: Runner, func: Any) -> Handler:
    """Return a handler that makes a tensor on a GPU, the host, or ``meta`` if user code asks so."""
    machine = runner.machine
    copies = func._schema.name == "aten::_to_copy"
    rule = tables.rule_of(func)
    operator = Operator.of(func)
    placement = machine.placement
    # ZeroTensorAllocator (aten/src/ATen/native/TensorFactories.cpp) allocates nothing.
    has_memory = func._schema.name != "aten::_efficientzerotensor"
    make = partial(runner.run, func)
    if not copies and func._schema.name not in _IN_CPP:
        make = partial(runner.run_once, func)

    def place(args: Args, kwargs: Kwargs) -> GPU:
        assert placement is not None
        source = source_of_node() if copies else None
        if source is not None:
            return machine.device(source.index)
        return placement.of(func._schema.name, args, kwargs)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        target = kwargs.get("device")
        if kwargs.get("pin_memory"):
            # Host memory is pageable here: pinning it needs a driver.
            return machine.pinned.add(handle(args, {**kwargs, "pin_memory": False}))
        owner = runner.device_kind_of(args, kwargs)
        if target is None:
            if owner is None:
                return runner.run_elsewhere(func, args, kwargs)
            where = raw.CPU if owner == HOST else None
        elif target.type == "meta":
            # None where C++ has copied meta from the options of a CUDA tensor.
            thread = machine.thread_state
            where = thread.destination or (raw.META if thread.on_meta else None)
        else:
            where = target
        if where is not None and where.type not in ("cpu", "cuda"):
            machine.thread_state.on_meta = where.type == "meta"
            return runner.run_elsewhere(func, args, kwargs)
        to_host = where is not None and where.type == "cpu"
        is_sparse = copies and args[0].layout is not torch.strided
        if is_sparse and to_host != (owner in (None, HOST)):
            # Shapes do not show how many elements it has.
            raise UnsupportedOperatorError(
                f"a sparse tensor moves between host and GPU at {user_line()}, which a simulated "
                "GPU cannot do: make it on the device it is used on, or move a dense one"
            )
        if to_host:
            if owner is None:
                return runner.run_elsewhere(func, args, kwargs)
            record = runner.storages.of(args[0]) if copies else None
            if record is not None and record.nbytes:
                machine.kernel_wrote()  # adds a node to a capture
                transfers.stage_move(machine.device(record.device.index), args[0], kwargs)
            moved = runner.values.on_host(operator, args, {**kwargs, "device": raw.CPU})
            if moved is None:
                moved = runner.run_on_host(operator, args, {**kwargs, "device": raw.META})
            if record is not None and kwargs.get("non_blocking"):
                # pin_out of _to_copy, aten/src/ATen/native/TensorConversions.cpp
                machine.pinned.add(moved)
            return moved
        if where is not None:
            device = machine.device(where.index)
            kwargs = {**kwargs, "device": raw.META}
        else:
            device = machine.current if placement is None else place(args, kwargs)
        if copies and runner.is_users_own(args[0]):
            raise NotImplementedError(NO_DATA)
        machine.thread_state.on_meta = False
        shapes_only = kwargs
        if kwargs.get("generator") is not None:
            shapes_only = {**kwargs, "generator": None}
        if copies and not raw.is_meta(args[0]):
            running.operator = FROM_HOST
        if copies and sparse.is_sparse(args[0]):
            with runner.mode:
                return sparse.converted(args[0], kwargs.get("dtype"))
        result = make(args, shapes_only)
        if has_memory:
            runner.track(result, device)
        else:
            runner.storages.mark_host_scalars([result])
        if copies and runner.storages.of(args[0]) is None:
            transfers.stage_upload(device, result, args[0], bool(kwargs.get("non_blocking")))
        if rule is not None:
            Call(rule, device, args, kwargs).end(result)
        runner.values.make(operator, args, kwargs, result)
        return result

    return handle


def scalar(runner: Runner, func: Any) -> Handler:
    """Return a handler that makes a tensor of a number, as C++ does for arguments, too."""
    make = factory(runner, func)
    machine, thread = runner.machine, runner.machine.thread_state
    operator = Operator.of(func)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        target = kwargs.get("device")
        # C++ makes it by the options of a tensor, scalar_tensor(0., grad.options()): it is on
        # the GPU, or on meta if the user has such tensors, which the next operator shows.
        is_unsure = thread.sets_items or machine.has_real_meta
        if target is not None and target.type == "meta" and is_unsure:
            # x[i] = 1.0: on CUDA the number becomes a CPU scalar and nothing is allocated
            # (torch/csrc/autograd/python_variable_indexing.cpp, THPVariable_setitem).
            result = runner.run(func, args, kwargs)
            runner.storages.mark_host_scalars([result])
            runner.values.make(operator, args, kwargs, result)
            if not thread.sets_items and thread.destination is None:
                thread.number = result
            return result
        return make(args, kwargs)

    return handle
