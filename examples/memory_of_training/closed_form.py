"""The same bytes, computed without running anything."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

BLOCK = 512
"""The caching allocator rounds every tensor up to a multiple of this."""

CATEGORIES = (
    "trainable_params",
    "input",
    "output",
    "gradient",
    "intermediate_tensors",
    "optimizer_state",
)


def in_blocks(*shape: int, itemsize: int = 4) -> int:
    """Return the bytes that a tensor of ``shape`` takes on the device."""
    return -(-prod(shape) * itemsize // BLOCK) * BLOCK


INTERMEDIATES: dict[
    str, tuple[Callable[..., Any], list[tuple[int, int]], list[tuple[int, int]], int]
] = {
    "x @ w": (lambda x, w: x @ w, [(256, 250)], [(100, 256)], 0),
    "x + w": (lambda x, w: x + w, [(100, 256)], [], 0),
    "(x * 2) @ w": (
        lambda x, w: (x * 2) @ w,
        [(256, 250)],
        [(100, 256)],
        in_blocks(100, 256),
    ),
    "((x + 2) @ w1 + 3) * w2": (
        lambda x, w1, w2: ((x + 2) @ w1 + 3) * w2,
        [(256, 250), (100, 250)],
        [(100, 256), (100, 250), (100, 250)],
        in_blocks(100, 256) + in_blocks(100, 250),
    ),
}
"""Tensors kept by autograd for an input of (100, 256) and weights: a computation, the shapes of its
weights, the shapes that it saves for backward, and the bytes that it keeps beside input and
output.
"""


def linear(inputs: int, outputs: int) -> int:
    """Bytes of the weight and the bias of a linear layer; its gradients take the same."""
    return in_blocks(outputs, inputs) + in_blocks(outputs)


def deep_network(blocks: int) -> int:
    """Bytes of the parameters of blocks of Linear(200, 100) and Linear(100, 200)."""
    return blocks * (linear(200, 100) + linear(100, 200))


def optimizer_timeline(state_copies: int, steps: int = 4) -> dict[str, dict[str, int]]:
    """Return each category's bytes at each event of training Linear(256, 250), with a batch of 100.

    ``state_copies`` is how often the optimizer keeps the size of the model: 0 for SGD, 2 for Adam.
    """
    model, x, y = linear(256, 250), in_blocks(100, 256), in_blocks(100, 250)
    held = dict.fromkeys(CATEGORIES, 0)
    timeline: dict[str, dict[str, int]] = {}

    def event(name: str, **now: int) -> None:
        held.update(now)
        timeline[name] = dict(held)

    event("baseline")
    event("model_allocation", trainable_params=model)
    event("optimizer_init")
    event("input_allocation", input=x)
    for step in range(1, steps + 1):
        event(f"optim_zero_grad_{step}", gradient=0)
        # The layer needs only its input again, which is live anyway: no intermediate tensors.
        event(f"forward_{step}", output=y)
        event(f"backward_{step}", gradient=model)
        event(f"optim_step_{step}", output=0, optimizer_state=state_copies * model)
    return timeline
