"""Operators that CUDA takes apart otherwise than the CPU, traced in inference mode.

They are taken apart above autograd, whose key the tensors of inference mode have not. There
FakeTensorMode and FunctionalTensorMode take an operator apart by ``OpOverload.decompose``, in C++,
for which the tensors are on ``meta``: attention would be the one of the math kernel.

Source: torch/_ops.py (``OpOverload.decompose``), torch/_subclasses/fake_tensor.py and
functional_tensor.py, torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.operators.rules import on_machine
from pytest_gpumem.simulated.operators.tables import COMPOSITES


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Plan decompositions of operators on the GPUs of ``machine`` as on CUDA."""
    patches.add(OpOverload, "decompose", _as_on_cuda(machine, OpOverload.decompose))


def _as_on_cuda(machine: SimulatedMachine, decompose: Callable[..., Any]) -> Callable[..., Any]:
    def call(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        implementation = COMPOSITES.get(str(operator))
        if implementation is None or not any(map(_is_of_gpu, tree_leaves((args, kwargs)))):
            return decompose(operator, *args, **kwargs)
        return on_machine(implementation, operator, machine)(*args, **kwargs)

    return call


def _is_of_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda
