"""The rules of all families, and how composite operators are routed to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature

import torch
from torch._ops import OpOverload

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.operators import (
    activations,
    assertions,
    attention,
    bilinear,
    chunks,
    comparisons,
    convolution,
    counting,
    ctc,
    cudnn_convolution,
    distances,
    dropout,
    embeddings,
    encoders,
    engine,
    foreach,
    gradient_layouts,
    group_norm,
    grouped,
    indexing,
    libraries,
    losses,
    matmul,
    normalization,
    packed_attention,
    reductions,
    rnn,
    rolling,
    sampling,
    scattering,
    shapes_only,
    slices,
    softmax,
    solvers,
    sorting,
    spatial,
    sync_batch_norm,
    whole,
)
from pytest_gpumem.simulated.operators.autocast import CastCache
from pytest_gpumem.simulated.operators.calls import overload_of
from pytest_gpumem.simulated.operators.rules import BoundRule, Composite, Rule, on_machine

RULES: dict[str, Rule] = {
    **assertions.RULES,
    **attention.RULES,
    **packed_attention.RULES,
    **chunks.RULES,
    **comparisons.RULES,
    **counting.RULES,
    **ctc.RULES,
    **distances.RULES,
    **dropout.RULES,
    **embeddings.RULES,
    **foreach.RULES,
    **grouped.RULES,
    **indexing.RULES,
    **libraries.RULES,
    **losses.RULES,
    **matmul.RULES,
    **normalization.RULES,
    **group_norm.RULES,
    **reductions.RULES,
    **rolling.RULES,
    **sampling.RULES,
    **scattering.RULES,
    **softmax.RULES,
    **solvers.RULES,
    **sorting.RULES,
    **spatial.RULES,
}
"""By operator name: hidden allocations."""


@cache
def rule_of(func: OpOverload) -> BoundRule | None:
    """Return the rule that ``func`` follows."""
    rule = RULES.get(func._schema.name)
    # ``upsample_nearest2d.vec_out``: generated from a composite, as is its CUDA kernel.
    is_built = func._overloadname == "vec_out"
    return None if rule is None or is_built else BoundRule(rule, func._schema)


COMPOSITES: dict[str, Composite] = {
    **activations.COMPOSITES,
    **attention.COMPOSITES,
    **comparisons.COMPOSITES,
    **ctc.COMPOSITES,
    **dropout.COMPOSITES,
    **embeddings.COMPOSITES,
    **engine.COMPOSITES,
    **matmul.COMPOSITES,
    **normalization.COMPOSITES,
    **rnn.COMPOSITES,
    **softmax.COMPOSITES,
    **solvers.COMPOSITES,
}
"""By overload: operators that CUDA takes apart otherwise than the CPU and ``meta`` do."""

IN_VIEW: dict[str, Composite] = {
    **bilinear.IN_VIEW,
    **convolution.IN_VIEW,
    **ctc.IN_VIEW,
    **cudnn_convolution.IN_VIEW,
    **encoders.IN_VIEW,
    **indexing.IN_VIEW,
    **losses.IN_VIEW,
    **rnn.IN_VIEW,
    **sync_batch_norm.IN_VIEW,
    **whole.IN_VIEW,
}
"""By overload: operators that autograd sees whole and that CUDA builds from others."""


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
        for name, implementation in COMPOSITES.items():
            operator = name.removeprefix("aten.").removesuffix(".default")
            overload = overload_of(operator)
            assert overload is not None
            kernel = on_machine(implementation, overload, machine)
            library.impl(operator, kernel, "AutogradMeta")
        for name, kernel in (*foreach.SHAPES.items(), *shapes_only.SHAPES.items()):
            if _lacks_shapes(name):
                library.impl(name, kernel, "Meta")
        for name, kernel in (*shapes_only.WRONG.items(), *gradient_layouts.WRONG.items()):
            if MAY_OVERRIDE and overload_of(name) is not None:
                library.impl(name, kernel, "Meta", allow_override=True)
        with casts.reachable(), slices.made(machine.current.version):
            yield
    finally:
        patches.undo()
        library._destroy()


def _lacks_shapes(name: str) -> bool:
    """Return whether this torch has the operator, but no kernel for ``meta``."""
    found = overload_of(name)
    return found is not None and not found.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta)
