"""What CUDA operators allocate, by family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.operators import (
    attention,
    dropout,
    foreach,
    indexing,
    losses,
    matmul,
    normalization,
    reductions,
    rnn,
    slices,
)
from pytest_gpumem.simulated.operators.engine import IN_PLACE, InPlace, in_formula
from pytest_gpumem.simulated.operators.rules import Rule
from pytest_gpumem.simulated.patching import Patches

if TYPE_CHECKING:
    from pytest_gpumem.simulated.simulation import Simulation

__all__ = [
    "COMPOSITES",
    "IN_PLACE",
    "IN_VIEW",
    "RULES",
    "InPlace",
    "Rule",
    "in_formula",
    "installed",
]

RULES: dict[str, Rule] = {
    **attention.RULES,
    **foreach.RULES,
    **indexing.RULES,
    **losses.RULES,
    **matmul.RULES,
    **reductions.RULES,
}
"""By operator name: hidden allocations."""

COMPOSITES: dict[str, Callable[..., Any]] = {
    **attention.COMPOSITES,
    **dropout.COMPOSITES,
    **matmul.COMPOSITES,
    **normalization.COMPOSITES,
    **rnn.COMPOSITES,
}
"""By overload: operators that CUDA takes apart otherwise than the CPU and ``meta`` do."""

IN_VIEW: dict[str, Callable[..., Any]] = {**losses.IN_VIEW, **rnn.IN_VIEW}
"""By overload: operators that autograd sees whole and that CUDA builds from others."""


@contextmanager
def installed(simulation: Simulation) -> Iterator[None]:
    """Route composite operators of meta tensors the way CUDA goes, above autograd."""
    library = torch.library.Library("aten", "IMPL")
    patches = Patches()
    rnn.plan(patches)
    patches.apply()
    try:
        for name, implementation in COMPOSITES.items():
            operator = name.removeprefix("aten.").removesuffix(".default")
            library.impl(operator, implementation, "AutogradMeta")
        with simulation.autocast.reachable(), slices.made(simulation.current.version):
            yield
    finally:
        patches.undo()
        library._destroy()
