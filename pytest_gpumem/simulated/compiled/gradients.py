"""Gradients while torch traces for a GPU: operators that are built from others keep theirs.

C++ takes fake tensors of a GPU for ``meta`` (see ``fakes``), for which torch gives many such
operators a kernel of Python's: the shapes of ``torch.where`` with a number, of ``std``, of
``nll_loss``. Autograd's key of a device that has a kernel no longer takes an operator apart, so
Python's dispatcher would lead these past autograd, and nothing would be saved for backward. On
CUDA they are taken apart.

Source: torch/_ops.py, ``resolve_key``; torch/_meta_registrations.py, ``activate_meta``; torch 2.11
and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch._higher_order_ops.flex_attention
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from pytest_gpumem.late_modules import Context
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.signatures import overload_of

_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key


@contextmanager
def kept() -> Iterator[None]:
    """Decompose such operators inside, above autograd."""
    operators = _with_shapes_alone()
    for operator in operators:
        operator.py_kernels[DispatchKey.AutogradMeta] = operator.decompose
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator in operators:
            del operator.py_kernels[DispatchKey.AutogradMeta]
            operator._dispatch_cache.clear()


@cache
def _with_shapes_alone() -> tuple[OpOverload, ...]:
    """Return ATen's operators that are built from others and have a Python ``meta`` kernel."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        operator = overload_of(name.removeprefix("aten::")) if name.startswith("aten::") else None
        # One with a kernel for meta in C++ has one for CUDA, too, and is not decomposed there.
        if (
            operator is not None
            and DispatchKey.Meta in operator.py_kernels
            and _has_kernel(operator.name(), "CompositeImplicitAutograd")
            and not any(_has_kernel(name, key) for key in ("Meta", "Autograd", "AutogradMeta"))
        ):
            found.append(operator)
    return tuple(found)


_MODULE = sys.modules["torch._higher_order_ops.flex_attention"]
_TRACES = "create_fw_bw_graph"
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def add_patches(patches: Patches, tracer: Callable[[], Any], code: Context) -> None:
    """Replace the tracing of scores' gradients for FlexAttention that is not compiled.

    torch traces them while the program runs, with fake tensors, in a mode that takes the place of
    the simulation's own. The example of a gradient that the trace is given is no fake tensor, so it
    takes memory: inside ``code()`` operators run on a simulated GPU. Source:
    torch/_higher_order_ops/flex_attention.py (``create_fw_bw_graph``), torch 2.11 to 2.15.
    """
    trace = getattr(_MODULE, _TRACES)
    make = torch.empty_strided

    def empty_strided(*args: Any, **options: Any) -> Any:
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return make(*args, **options)
        with code():
            return torch.empty_strided(*args, **options)

    def create_fw_bw_graph(*args: Any) -> Any:
        tracing = tracer()
        if tracing.is_entered:  # Dynamo traces it, with fake tensors of its own
            return trace(*args)
        with (
            tracing.entered(),
            _disable_current_modes(),
            mock.patch.object(torch, "empty_strided", empty_strided),
        ):
            return trace(*args)

    patches.add(_MODULE, _TRACES, create_fw_bw_graph)
