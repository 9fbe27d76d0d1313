"""Launches of Triton's kernels, which compute nothing: their results are unknown afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from pytest_gpumem.dry.values.graphs import Graphs
from pytest_gpumem.dry.values.known import DryValues
from pytest_gpumem.simulated.common.patching import Patches, patched_when_imported
from pytest_gpumem.simulated.common.raw import PLAIN, tensors_in
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.operators.described import base_function
from pytest_gpumem.simulated.operators.triton_stores import Stores

_LAUNCHERS = {
    "triton.runtime.jit": "JITFunction",
    "torch._inductor.runtime.triton_heuristics": "CachingAutotuner",
}
"""Classes whose ``run`` launches a kernel with tensors among its arguments, by module.

Triton 3.2 to 3.9, torch 2.6 to 2.15.
"""
_OF_USER = "USER_AUTOTUNE"
"""Kind of a user's own kernel in compiled code (``HeuristicType`` of runtime/hints.py)."""


@contextmanager
def launches_seen(values: DryValues, graphs: Graphs) -> Iterator[None]:
    """Mark the tensors that Triton's kernels inside may write to as unknown in ``values``."""
    stores = Stores()

    def plan(patches: Patches, module: ModuleType) -> None:
        kind = getattr(module, _LAUNCHERS[module.__name__])
        run = kind.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(kernel, *args, **kwargs)
            name = getattr(getattr(kernel, "fn", None), "__name__", "of compiled code")
            values.uncomputed = values.uncomputed or f"the Triton kernel {name}"
            for tensor in tensors_in(_written(stores, kernel, args, kwargs)):
                if tensor.__class__ in PLAIN and tensor.is_cuda:
                    graphs.lost(tensor)
            return result

        patches.add(kind, "run", launch)

    with patched_when_imported(dict.fromkeys(_LAUNCHERS, plan)):
        yield


def _written(stores: Stores, kernel: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the arguments that ``kernel`` may write to: all, where nothing tells.

    Inductor drops the source of its kernels, but names their arguments by use: ``in_ptr0`` is only
    read (``KernelArgs`` of torch/_inductor/codegen/common.py, torch 2.6 to 2.15).
    """
    function = base_function(kernel)
    if isinstance(function, FunctionType):
        names, written = list(inspect.signature(function).parameters), set(stores.of(kernel))
    elif getattr(getattr(kernel, "heuristic_type", None), "name", _OF_USER) == _OF_USER:
        return args, kwargs
    else:
        names = kernel.fn.arg_names
        written = {name for name in names if not name.startswith("in_ptr")}
        written |= set(kernel.mutated_arg_names)
    if len(args) > len(names):
        return args, kwargs
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given[name] for name in given.keys() & written]
