"""Random operators: memory for the generator's state in a capture, and unread random numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

SMALLEST = 1 << 16
"""Fewest numbers of a tensor that is left unfilled; code may decide by smaller ones."""


def noting_randomness(machine: SimulatedMachine, func: Any, handler: Handler) -> Handler:
    """Wrap a random operator: in a capture it may need memory for its state.

    On the CPU it may be left out, if ``machine`` leaves large tensors unfilled.
    """
    unfilled = _UNFILLED.get(func)
    draws = _draws(func)

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        streams = machine.streams
        if streams.captures and draws(args, kwargs):
            gpu = machine.current
            capture = streams.captures.get((gpu.index, gpu.stream))
            if capture is not None and capture.graph is not None:
                capture.graph.use_random_operator(gpu, kwargs.get("generator"))
        if unfilled is not None and machine.leaves_unfilled:
            left = unfilled(args, kwargs)
            if left is not None:
                return left
        return handler(args, kwargs)

    return handle


def _draws(func: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Return whether a call uses the generator: fused attention does only to drop something.

    Source: native/transformers/cuda/attention.cu (_efficient_attention_forward) and
    flash_attn/flash_api.cpp (mha_fwd), ``if (p_dropout > 0.0)``; cuDNN's always does.
    """
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names or "cudnn" in func._schema.name:
        return lambda args, kwargs: True
    at = names.index("dropout_p")

    def draws(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(args[at] if len(args) > at else kwargs.get("dropout_p", 0.0))

    return draws


def _in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    tensor: torch.Tensor = args[0]
    return None if raw.is_meta(tensor) or tensor.numel() < SMALLEST else tensor


def _factory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    device = kwargs.get("device")
    is_on_host = device is None or device.type == "cpu"
    if not is_on_host or kwargs.get("pin_memory") or prod(args[0]) < SMALLEST:
        return None
    return torch.empty(args[0], **kwargs)


_UNFILLED: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], torch.Tensor | None]] = {
    torch.ops.aten.uniform_.default: _in_place,
    torch.ops.aten.normal_.default: _in_place,
    torch.ops.aten.rand.default: _factory,
    torch.ops.aten.randn.default: _factory,
}
"""Functions that return an uninitialised tensor, or ``None`` for one that is to be filled."""
