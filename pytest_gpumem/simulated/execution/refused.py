"""Operators whose kernels for ``meta`` return other results than CUDA's."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.simulated.execution.runner import Runner, no_shapes
from pytest_gpumem.simulated.machine.dispatch import Handler


def quantizes(func: Any) -> bool:
    """Return whether ``func`` makes a quantized tensor."""
    return bool(func._schema.name.startswith("aten::quantize_per_"))


def quantize(runner: Runner, func: Any) -> Handler:
    """Return a handler that refuses quantizing, but for tensors of the CPU."""

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if runner.owner(args, kwargs) is None:
            return runner.run_elsewhere(func, args, kwargs)
        # The meta kernel returns an ordinary tensor of the input's type.
        raise no_shapes(runner, func, args, kwargs)

    return handle
