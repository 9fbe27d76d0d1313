"""Launches of Triton's kernels, which compute nothing: their tensors are unknown afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_gpumem.dry.values.graphs import Graphs
from pytest_gpumem.dry.values.known import DryValues
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.common.raw import tensors_in

_LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner"),
)
"""Classes whose ``run`` launches a kernel with tensors among its arguments (Triton 3.2 to 3.6,
torch 2.6 to 2.15)."""


@contextmanager
def launches_seen(values: DryValues, graphs: Graphs) -> Iterator[None]:
    """Mark the tensors given to Triton's kernels inside as unknown in ``values``."""
    patches = Patches()
    for module, name in _LAUNCHERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            patches.add(kind, "run", _marking(kind.run, values, graphs))
    patches.apply()
    try:
        yield
    finally:
        patches.undo()


def _name(kernel: Any) -> str:
    return str(getattr(getattr(kernel, "fn", None), "__name__", "of compiled code"))


def _marking(run: Any, values: DryValues, graphs: Graphs) -> Any:
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(kernel, *args, **kwargs)
        values.uncomputed = values.uncomputed or f"the Triton kernel {_name(kernel)}"
        for tensor in tensors_in((args, kwargs)):
            if tensor.__class__ in (torch.Tensor, torch.nn.Parameter) and tensor.is_cuda:
                graphs.lost(tensor)
        return result

    return launch
