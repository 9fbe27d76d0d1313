"""Types of tensors that an operator has no CUDA kernel for, or refuses to combine."""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.allocator.settings import Version
from pytest_gpumem.simulated.machine.checks.given import Check, Given
from pytest_gpumem.simulated.machine.checks.kernels import DISPATCHES
from pytest_gpumem.simulated.machine.checks.requirements import REQUIREMENTS


def checks_of(func: Any) -> tuple[Check, ...]:
    """Return the checks of the operator ``func`` on the types of its arguments on CUDA."""
    if not func._schema.name.startswith("aten::"):
        return ()
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    dispatch = DISPATCHES.get(name)
    return REQUIREMENTS.get(name, ()) + (() if dispatch is None else (dispatch,))


def refuse_types(
    checks: tuple[Check, ...],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    version: Version,
) -> None:
    """Raise CUDA's errors on arguments of these types."""
    given = Given(func, args, kwargs, version)
    for tensor in given.tensors():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return  # Kernels of their own.
    for check in checks:
        error = check(given)
        if error is not None:
            raise error
