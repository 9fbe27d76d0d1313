"""What a CUDA operator allocates beyond its outputs: the shape of one rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpumem.simulated.device import SimulatedGPU

Before = Callable[["SimulatedGPU", tuple[Any, ...], dict[str, Any]], None]
After = Callable[["SimulatedGPU", tuple[Any, ...], dict[str, Any], Any], None]


@dataclass(frozen=True)
class Rule:
    """What happens on the device before and after an operator's outputs are allocated."""

    before: Before | None = None
    after: After | None = None
