"""The rules of all families, and how composite operators are routed to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch._ops import OpOverload

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.signatures import overload_of
from pytest_gpumem.simulated.operators import meta_kernels, rnn, slices
from pytest_gpumem.simulated.operators.autocast import CastCache
from pytest_gpumem.simulated.operators.rules import BoundRule, Composite, Rule, on_machine

_FAMILIES = [
    import_module(f"{__package__}.{family}")
    for family in """
        activations attention batch_norm chunks comparisons convolution embeddings encoders engine
        factorizations indexing libraries matmul matrix_functions moments normalization reductions
        rnn solvers sorting spatial below_autograd
    """.split()
]


def _of_all(table: str, prefix: str = "") -> dict[str, Any]:
    """Return the entries of every family's ``table``, each for one or several names."""
    found = [vars(family).get(table, {}) for family in _FAMILIES]
    return {
        f"{prefix}{name}": entry
        for entries in found
        for names, entry in entries.items()
        for name in names.split()
    }


_META = torch._C.DispatchKey.Meta

RULES: dict[str, Rule] = _of_all("RULES", "aten::")
"""By operator name: hidden allocations."""
ABOVE_AUTOGRAD: dict[str, Composite] = _of_all("ABOVE_AUTOGRAD")
"""By overload: operators that CUDA takes apart otherwise than the CPU and ``meta`` do."""
BELOW_AUTOGRAD: dict[str, Composite] = _of_all("BELOW_AUTOGRAD")
"""By overload: operators that autograd sees whole and that CUDA builds from others."""


@cache
def rule_of(func: OpOverload) -> BoundRule | None:
    """Return the rule that ``func`` follows."""
    rule = RULES.get(func._schema.name)
    # ``upsample_nearest2d.vec_out``: generated from a composite, as is its CUDA kernel;
    # ``repeat_interleave`` along a dimension: made of the overload that repeats numbers.
    is_built = func._overloadname in ("vec_out", "self_Tensor", "self_int")
    return None if rule is None or is_built else BoundRule(rule, func._schema)


MAY_OVERRIDE = "allow_override" in signature(torch.library.Library.impl).parameters
"""Whether torch lets its own kernels be replaced. Not in 2.6, where they give the right shapes, but
check less than CUDA's."""


@contextmanager
def installed(machine: SimulatedMachine, casts: CastCache) -> Iterator[None]:
    """Route composite operators of meta tensors as on CUDA, above autograd."""
    library = torch.library.Library("aten", "IMPL")
    patches = Patches()
    rnn.add_patches(patches)
    patches.apply()
    try:
        for name, implementation in ABOVE_AUTOGRAD.items():
            operator = name.removeprefix("aten.").removesuffix(".default")
            overload = overload_of(operator)
            assert overload is not None
            kernel = on_machine(implementation, overload, machine)
            library.impl(operator, kernel, "AutogradMeta")
        for name, kernel in meta_kernels.SHAPES.items():
            found = overload_of(name)
            if found is not None and not found.has_kernel_for_dispatch_key(_META):
                library.impl(name, kernel, "Meta")
        for name, kernel in meta_kernels.WRONG.items():
            if MAY_OVERRIDE and overload_of(name) is not None:
                library.impl(name, kernel, "Meta", allow_override=True)
        with casts.reachable(), slices.made(machine.current.version):
            yield
    finally:
        patches.undo()
        library._destroy()
