"""Random operators: in a capture they may need memory for the generator's state."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def noting_randomness(machine: SimulatedMachine, handler: Handler) -> Handler:
    """Wrap a random operator: in a capture it may need memory for its state."""

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        streams = machine.streams
        if streams.captures:
            gpu = machine.current
            capture = streams.captures.get((gpu.index, gpu.stream))
            if capture is not None and capture.graph is not None:
                capture.graph.use_random_operator(gpu, kwargs.get("generator"))
        return handler(args, kwargs)

    return handle
