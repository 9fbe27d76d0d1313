"""``tensor.data = other`` across devices: the tensor stays, with its gradient and its graph.

torch lets CPU and CUDA take each other's place, but not CPU and ``meta``. It calls its dispatcher
for that first, which answers here as for a GPU; the copying is then the same.

Source: torch/csrc/autograd/variable.cpp (VariableHooks::set_data), c10/core/TensorImpl.h
(has_compatible_shallow_copy_type, shallow_copy_from), torch 2.6 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.execution.mode import ShapeExecution

_QUESTION = "_has_compatible_shallow_copy_type"

_is_put: ContextVar[bool] = ContextVar("is_put", default=False)
_CPU = torch._C.DispatchKey.CPU


@contextmanager
def answering(execution: ShapeExecution) -> Iterator[None]:
    """Install the answer inside: before autograd, and in ``execution`` for inference mode."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "AutogradMeta"):
        library.impl(_QUESTION, _may_take_place, key)
    execution.bind(
        getattr(torch.ops.aten, _QUESTION).default, lambda args, _: _may_take_place(*args)
    )
    try:
        yield
    finally:
        library._destroy()


def put(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Give ``tensor`` the contents of ``new``, one of them being on the CPU and one on ``meta``."""
    before = _is_put.set(True)
    try:
        raw.data.__set__(tensor, new)
    finally:
        _is_put.reset(before)


def _may_take_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    keys, others = (torch._C._dispatch_keys(tensor) for tensor in (one, other))
    dense = one.layout is other.layout is torch.strided
    on_cpu = keys.has(_CPU) and others.has(_CPU)
    return _is_put.get() or keys.raw_repr() == others.raw_repr() or (dense and on_cpu)
