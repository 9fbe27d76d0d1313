"""Operators that the dry device takes apart: what they call is followed."""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.dry.values.graphs import Graphs
from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.values.operator import Operator

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Parts:
    """An operator composed of others that are followed; a library's results are unknown."""

    def __init__(self, func: Any, graphs: Graphs | None) -> None:
        self._func = func
        self._graphs = graphs
        self._operator = Operator.of(func)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the kernel at the key below, not this one again."""
        func = self._func
        if is_composite(func):
            result = func._op_dk(_COMPOSITE, *args, **kwargs)
        else:  # a kernel in Python, which torch calls by a set of keys only
            keys = torch._C.DispatchKeySet(_key_of(args, kwargs))
            result = func.redispatch(keys, *args, **kwargs)
        self._write(result, args, kwargs)
        return result

    def _write(self, result: Any, args: Args, kwargs: Kwargs) -> None:
        """Note what it has written."""
        if self._graphs is not None:
            for tensor in tensors_in((result, self._operator.targets(args, kwargs))):
                if tensor.is_cuda:
                    self._graphs.mark_unknown(tensor)


def is_composite(func: Any) -> bool:
    """Return whether torch composes ``func`` of others on a GPU, unlike ``silu_backward``."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), _COMPOSITE.name) and not has_kernel(func.name(), "CUDA")


def _key_of(args: Args, kwargs: Kwargs) -> Any:
    """Return the backend that runs an operator of other libraries."""
    on_gpu = any(tensor.is_cuda for tensor in tensors_in((args, kwargs)))
    device = kwargs.get("device")
    on_gpu = on_gpu or (isinstance(device, torch.device) and device.type == "cuda")
    return torch._C.DispatchKey.CUDA if on_gpu else torch._C.DispatchKey.CPU
