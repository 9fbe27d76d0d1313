"""Control flow that runs eagerly: its gradients are traced by running it, on the device.

torch removes all modes for that, and the tracing's computations take memory like any others.

Source: torch/_higher_order_ops/utils.py (``materialize_as_graph``), torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch._higher_order_ops
from torch.utils import _python_dispatch

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_TRACED = "materialize_as_graph"


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Show the machine the operators in traced control flow."""
    package = torch._higher_order_ops
    for name in vars(package):  # where most modules are hidden by a function of their name
        owner = sys.modules.get(f"{package.__name__}.{name}")
        if owner is not None and _TRACED in vars(owner):
            patches.add(owner, _TRACED, _in_view(machine, vars(owner)[_TRACED]))


def _in_view(machine: SimulatedMachine, trace: Callable[..., Any]) -> Callable[..., Any]:
    set_aside = _python_dispatch._disable_current_modes

    @contextmanager
    def all_others() -> Iterator[Any]:
        mode: Any = machine.execution
        with set_aside() as modes, mode:
            yield modes

    def materialize_as_graph(*args: Any, **options: Any) -> Any:
        with mock.patch.object(_python_dispatch, "_disable_current_modes", all_others):
            return trace(*args, **options)

    return materialize_as_graph
