"""Operators of ``torch.library`` and functions of extensions, as the libraries have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pytest_gpumem.simulated.operators.described import DESCRIPTIONS, simulate_operator


def register(
    name: str,
    schema: str,
    description: Callable[..., Any],
    *,
    mutates: Sequence[str] = (),
    values: Callable[..., Any] | None = None,
) -> Any:
    """Register the operator ``name`` and return it.

    ``description`` allocates as on a GPU, ``values`` computes it on the CPU. A
    description of the user's own comes first.
    """

    def run(*args: Any, **options: Any) -> Any:
        raise RuntimeError(f"the stand-in of {name} runs on a simulated GPU alone")

    operator = torch.library.custom_op(
        name, run, mutates_args=mutates, device_types="cuda", schema=schema
    )
    operator.register_fake(description)
    if values is not None:
        operator.register_kernel("cpu", values)
    DESCRIPTIONS.operators.setdefault(name, description)
    return operator


def compiled(description: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a compiled extension, which ``description`` allocates for.

    For tensors of the host it raises ``RuntimeError``, as a CUDA kernel does.
    """

    def kernel(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Expected a tensor that is_cuda(), but got one of the CPU")

    simulate_operator(kernel)(description)
    return kernel
