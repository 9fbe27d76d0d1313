"""Operators of ``torch.library``, as the libraries themselves register them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pytest_gpumem.simulated.operators.described import DESCRIPTIONS


def register(
    name: str,
    schema: str,
    description: Callable[..., Any],
    *,
    mutates: Sequence[str] = (),
    values: Callable[..., Any] | None = None,
) -> Any:
    """Register the operator ``name`` and return it.

    ``description`` allocates what it does on a GPU, ``values`` computes it on the CPU. A
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
