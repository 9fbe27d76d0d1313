"""Operators of other libraries: a description stands for those that have one.

What ``torch.library.triton_op`` makes needs none: it is built from operators of torch's and kernels
of Triton's, each of which is seen for itself. So are those that xformers and
apex write in Python around other kernels.
"""

from __future__ import annotations

from typing import Any

from torch._library.custom_ops import OPDEFS

from pytest_gpumem.simulated.execution.composites import of_parts, whole
from pytest_gpumem.simulated.execution.runner import TORCHS_OWN, Runner
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.operators.described import DESCRIPTIONS, checked_outputs, on_gpu


def is_custom(func: Any) -> bool:
    """Whether ``func`` is none of torch's own."""
    return func.namespace not in TORCHS_OWN


_IN_PYTHON = frozenset({"apex", "xformers_flash", "xformers_flash3"})
"""Namespaces of operators whose code is Python around other operators (xformers/ops/fmha/flash.py
and flash3.py of 0.0.35; apex/normalization/fused_layer_norm.py of 25.09)."""


def in_parts(runner: Runner, func: Any) -> Handler | None:
    """What ``func`` is built from, if ``torch.library.triton_op`` has made it, or Python.

    Its shape-only implementation is the same function, whose temporaries would go unseen
    (torch/_library/triton.py, torch 2.6 to 2.15).
    """
    definition = OPDEFS.get(func._schema.name)
    made = None if definition is None else definition._init_fn
    if made is None:
        return None
    if func.namespace not in _IN_PYTHON and made.__module__ != "torch._library.triton":
        return None
    return of_parts(runner, made)


def custom(runner: Runner, func: Any, undescribed: Handler) -> Handler:
    """``func``, as somebody has described it; ``undescribed`` runs it where nobody has."""
    schema = func._schema
    undescribed = in_parts(runner, func) or undescribed

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
