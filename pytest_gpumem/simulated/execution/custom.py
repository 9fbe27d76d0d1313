"""Composite operators, run as the operators that they consist of; operators of libraries.

A library's operator may have a description. One of ``torch.library.triton_op`` needs none: it
consists of torch's operators and Triton kernels, each of which the mode sees. The same holds for
those that xformers writes in Python around other kernels, and for one of
``torch.library.custom_op`` that has a device among its arguments, or no tensor, or whose shapes
depend on values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton as registrations
from torch._library.utils import fill_defaults, has_tensor_arg
from torch._ops import HigherOrderOperator

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import refusing, running
from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulated.execution import computing
from pytest_gpumem.simulated.execution.computing import is_factory
from pytest_gpumem.simulated.execution.runner import CUDA, Runner
from pytest_gpumem.simulated.machine.signatures import (
    Args,
    Handler,
    Kwargs,
    is_data_dependent,
    is_out,
)
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import autocast, below_autograd, tables
from pytest_gpumem.simulated.operators.custom_kernels import DESCRIPTIONS, checked_outputs, on_gpu
from pytest_gpumem.simulated.operators.rules import Call, decompose, on_machine
from pytest_gpumem.values.errors import UnknownValueError

_IN_PYTHON = frozenset({"flex_lib", "xformers_flash", "xformers_flash3"})
"""Namespaces of operators whose code is Python around other operators (xformers/ops/fmha/flash.py
and flash3.py of 0.0.35; torch/_dynamo/_trace_wrapped_higher_order_op.py of torch 2.11 to 2.15)."""

_TORCHS_OWN = frozenset({"torch_attn", "torch_nn"})
"""Namespaces of torch's own operators that are Python around other operators
(torch/nn/functional.py and _functions of linear_cross_entropy, since 2.14, and
torch/nn/attention/varlen.py, since 2.10)."""


def in_parts(runner: Runner, func: Any) -> Handler | None:
    """Return a handler that runs the operators in ``func``, if it is Python or from ``triton_op``.

    Its shape-only implementation is the same function, but the mode does not see its temporaries
    (torch/_library/triton.py, torch 2.6 to 2.15).
    """
    definition = OPDEFS.get(func._schema.name)
    if definition is None:
        return None
    made = definition._init_fn
    if made.__module__ == "torch._library.triton" or func.namespace in _IN_PYTHON:
        return of_parts(runner, made)
    if func.namespace in _TORCHS_OWN:
        return of_parts(runner, _kernel(definition))
    if is_factory(func) or not has_tensor_arg(func._schema):
        return _on_device(runner, definition)
    return None


def _on_device(runner: Runner, definition: Any) -> Handler:
    """Return a handler that runs the code of a custom operator whose tensors show no device."""
    kernel, shapes = _kernel(definition), definition._abstract_fn
    parts = of_parts(runner, kernel)
    shapes_only = parts if shapes is None else of_parts(runner, shapes)
    values = runner.values

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if values.everything or not any(map(raw.is_meta, raw.tensors_in((args, kwargs)))):
            return parts(args, kwargs)
        with values.ignoring():
            return shapes_only(args, kwargs)

    return handle


def _kernel(definition: Any) -> Any:
    """Return the function of ``torch.library.custom_op`` for GPUs, or for all devices."""
    functions = definition._backend_fns
    return functions.get("cuda", functions.get(None, definition._init_fn))


def _complete(func: Any, shapes_only: Handler) -> Handler:
    """Return a handler that passes ``shapes_only`` the defaults of ``func``, as kernels get them.

    C++ drops the last arguments from a call of a Python function if they equal their defaults
    (parseIValuesToPyArgsKwargs in torch/csrc/autograd/python_variable.cpp).
    """
    kernel = registrations.find(func._schema.name).fake_impl.kernel
    if kernel is None or func._schema.arguments[-1].default_value is None:
        return shapes_only
    function, schema = kernel.func, func._schema

    def complete(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = fill_defaults(schema, args, kwargs)
        return function(*args, **kwargs)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        kernel.func = complete
        try:
            return shapes_only(args, kwargs)
        finally:
            kernel.func = function

    return handle


_SIZED_BY_VALUES = "data-dependent shape"
"""Part of a shape-only implementation's error for such a size (torch/_library/fake_impl.py)."""


def _sized(runner: Runner, func: Any, shapes_only: Handler) -> Handler:
    """Return a handler of ``func`` that runs its own code where shapes depend on values.

    C++ code shows no operators: it is computed on the CPU where the values are known.
    """
    definition = OPDEFS.get(func._schema.name)

    def refuse(args: Args, kwargs: Kwargs) -> Any:
        raise UnknownValueError(runner.unknown(func))

    if definition is None:
        by_values = sized(runner, func, refuse)
    else:
        by_values = of_parts(runner, _kernel(definition))

    def handle(args: Args, kwargs: Kwargs) -> Any:
        try:
            return shapes_only(args, kwargs)
        except RuntimeError as error:
            if _SIZED_BY_VALUES not in str(error):
                raise
        return by_values(args, kwargs)

    return handle


def custom(runner: Runner, func: Any, undescribed: Handler) -> Handler:
    """Return a handler of ``func`` by its description; without one ``undescribed`` runs."""
    schema = func._schema
    undescribed = in_parts(runner, func) or _sized(runner, func, _complete(func, undescribed))
    parts = below_autograd.PARTS.get(str(func))
    built = None if parts is None else of_parts(runner, on_machine(parts, func, runner.machine))

    def describe(args: Args, kwargs: Kwargs) -> Any:
        description = DESCRIPTIONS.find(schema.name, schema.overload_name)
        assert description is not None
        with runner.mode:
            return checked_outputs(schema, description(*args, **kwargs))

    described = whole(runner, func, describe)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if not on_gpu(args, kwargs):
            return undescribed(args, kwargs)
        if DESCRIPTIONS.find(schema.name, schema.overload_name) is not None:
            return described(args, kwargs)
        return (built or undescribed)(args, kwargs)

    return handle


def is_sized_by_values(func: Any) -> bool:
    """Return whether values decide the sizes of results that ``func`` makes itself.

    False for ``linalg_lstsq``: with CUDA's method they depend on no values.
    """
    rule = tables.rule_of(func)
    is_shaped = rule is not None and rule.shapes is not None
    is_sized = is_data_dependent(func) and not is_out(func._schema)
    return is_sized and not is_shaped


def sized(runner: Runner, func: Any, otherwise: Handler) -> Handler:
    """Return a handler of ``func`` by its values; ``otherwise`` runs it where they are unknown."""
    rule = tables.rule_of(func)
    operator = Operator.of(func)
    machine = runner.machine
    placement = machine.placement
    name = func._schema.name

    def handle(args: Args, kwargs: Kwargs) -> Any:
        computed = None
        if runner.device_kind_of(args, kwargs) == CUDA:
            computed = runner.values.computed(operator, args, kwargs)
        if computed is None:
            return otherwise(args, kwargs)
        runner.check_placement(func, args, kwargs)
        device = machine.current if placement is None else placement.of(name, args, kwargs)
        call = None if rule is None else Call(rule, device, args, kwargs)
        result = _shaped_as(func, computed)
        runner.track(result if call is None else call.outputs(result), device)
        if call is not None:
            call.end(result)
        for tensor, values in zip(raw.tensors_in(result), raw.tensors_in(computed), strict=True):
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
        return raw.empty_strided(computed.shape, strides, dtype=computed.dtype, device=raw.META)
    return type(computed)(_shaped_as(func, item) for item in computed)


_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key


def is_composite(func: Any) -> bool:
    """Return whether torch builds ``func`` from other operators on every device."""
    # Some also have a kernel for CUDA and for meta: silu_backward.
    name = func.name()
    return _has_kernel(name, "CompositeImplicitAutograd") and not _has_kernel(name, "Meta")


_WRITTEN_IN_PARTS = torch._C.DispatchKey.CompositeExplicitAutograd
_WITH_KERNEL = frozenset(f"aten::{name}" for name in ("_chunk_cat", "split_with_sizes_copy"))
"""Operators whose overload with ``out`` has a CUDA kernel but no CPU kernel."""
_IN_PLACE = frozenset({"aten::cummax", "aten::cummin", "aten::mode"})
"""Operators that write to ``out`` by a kernel which has no ``meta`` implementation."""


def is_written_in_parts(func: Any) -> bool:
    """Return whether ``func`` makes a result and copies it to ``out``, as most such overloads do.

    Source: torchgen/native_function_generation.py (gen_composite_out_kernel), and by hand, such as
    ``dot_out`` of aten/src/ATen/native/Blas.cpp (2.6 to 2.15).
    """
    if not is_out(func._schema) or func._schema.name in _WITH_KERNEL | _IN_PLACE:
        return False
    has_kernel = _has_kernel(func.name(), "CPU") and func._schema.name != "aten::_stack"
    return func.has_kernel_for_dispatch_key(_WRITTEN_IN_PARTS) and not has_kernel


def written_in_parts(runner: Runner, func: Any) -> Handler:
    """Return a handler that runs the operators that ``func`` calls."""
    return of_parts(runner, partial(func._op_dk, _WRITTEN_IN_PARTS))


def composite(runner: Runner, func: Any) -> Handler:
    """Return a handler that runs ``func`` as CUDA's parts, else as torch's decomposition."""
    implementation = tables.ABOVE_AUTOGRAD.get(str(func))
    if implementation is None:
        return of_parts(runner, partial(decompose, func))
    return _on_gpu(runner, func, implementation)


def _on_gpu(runner: Runner, func: Any, implementation: Callable[..., Any]) -> Handler:
    """Return a handler that runs ``implementation`` on a GPU, and ``func`` itself elsewhere."""
    parts = of_parts(runner, _attributed(func, on_machine(implementation, func, runner.machine)))
    elsewhere = computing.of_rule(runner, func, None, resizes=False)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if runner.device_kind_of(args, kwargs) != CUDA:
            return elsewhere(args, kwargs)
        if running.composite is None:  # no other composite calls it
            runner.check_placement(func, args, kwargs)
        return parts(args, kwargs)

    return handle


def _attributed(func: Any, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``implementation`` so that allocations of its operators count as those of ``func``."""

    def attributed(*args: Any, **kwargs: Any) -> Any:
        with having(running, "composite", running.composite or func):
            return implementation(*args, **kwargs)

    return attributed


def composite_below_autograd(runner: Runner, func: Any) -> Handler:
    """Return a handler of an operator that is whole to autograd and a composite on CUDA."""
    return whole(runner, func, _on_gpu(runner, func, tables.BELOW_AUTOGRAD[str(func)]))


def higher_order(runner: Runner, func: HigherOrderOperator) -> Handler:
    """Return a handler of control flow, and of other operators that take functions."""
    if func.name() in _UNSEEN:
        return of_parts(runner, _UNSEEN[func.name()])
    # torch runs this in eager code; random operators of DTensor, and those that a checkpoint in
    # compiled code computes again (torch/_prims/rng_prims.py), have one only for CUDA.
    keys = torch._C.DispatchKey.CompositeExplicitAutograd, torch._C.DispatchKey.CUDA
    eagerly = next((func.py_kernels[key] for key in keys if key in func.py_kernels), None)
    if eagerly is not None:
        return of_parts(runner, eagerly)
    return refusing(func.name(), "is for compiled code, so it cannot run on a simulated GPU")


def of_parts(runner: Runner, implementation: Callable[..., Any]) -> Handler:
    """Return a handler that runs ``implementation``, and sees each operator in it."""

    def handle(args: Args, kwargs: Kwargs) -> Any:
        # Under inference_mode composites arrive whole: the mode has to see their operators.
        with runner.mode, autocast.of_parts():
            return implementation(*args, **kwargs)

    return placement_noting(runner, handle)


def placement_noting(runner: Runner, handler: Handler) -> Handler:
    """Return a handler that also notes the GPU of an operator whose tensors may be on several."""
    placement = runner.machine.placement
    return handler if placement is None else placement.noting(handler)


def whole(runner: Runner, func: Any, handler: Handler) -> Handler:
    """Return a handler that allocates as ``handler`` does and computes values by ``func``."""
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
