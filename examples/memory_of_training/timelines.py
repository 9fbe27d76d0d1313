"""Memory over time: at the events of a training loop, and between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from examples.memory_of_training.closed_form import in_blocks
from examples.memory_of_training.experiments import Read, allocated, deep_network

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def optimizer_timeline(
    make_optimizer: MakeOptimizer, read: Read = allocated, steps: int = 4
) -> dict[str, int]:
    """Train one layer and read its memory at every event."""
    seen = {"baseline": read()}
    model = nn.Linear(256, 250, device="cuda")
    seen["model_allocation"] = read()
    optimizer = make_optimizer(model.parameters())
    seen["optimizer_init"] = read()
    x = torch.randn(100, 256, device="cuda")
    seen["input_allocation"] = read()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        seen[f"optim_zero_grad_{step}"] = read()
        y = model(x)
        seen[f"forward_{step}"] = read()
        y.sum().backward()
        seen[f"backward_{step}"] = read()
        optimizer.step()
        del y
        seen[f"optim_step_{step}"] = read()
    return seen


@dataclass(frozen=True)
class Moment:
    """One allocation or free within a step."""

    milliseconds: float
    """Since the step began; a simulated GPU's clock advances a microsecond each event."""
    phase: str
    allocated: int


def step_timeline(make_optimizer: MakeOptimizer, blocks: int = 4, batch: int = 500) -> list[Moment]:
    """Every allocation and free of a deep network's second step, as the allocator saw them."""
    model = deep_network(blocks)
    optimizer = make_optimizer(model.parameters())
    x = torch.randn(batch, 200, device="cuda")
    model(x).sum().backward()
    optimizer.step()

    with _recording():
        before, begin = allocated(), len(_trace())
        optimizer.zero_grad()
        ends = {"zero_grad": len(_trace())}
        loss = model(x).sum()
        ends["forward"] = len(_trace())
        loss.backward()
        ends["backward"] = len(_trace())
        optimizer.step()
        ends["step"] = len(_trace())
        return list(_moments(_trace(), before, begin, ends))


@contextmanager
def _recording() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(context=None)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _trace() -> list[dict[str, Any]]:
    torch.cuda.synchronize()
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[torch.cuda.current_device()]


def _moments(
    trace: list[dict[str, Any]], before: int, begin: int, ends: dict[str, int]
) -> Iterator[Moment]:
    now = before
    for number, event in enumerate(trace[begin:], begin):
        sign = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        if sign:
            now += sign * in_blocks(event["size"], itemsize=1)
            phase = next(name for name, end in ends.items() if number < end)
            yield Moment((event["time_us"] - trace[begin]["time_us"]) / 1000, phase, now)
