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
    segments: dict[str, int]
    """Bytes allocated, by :data:`SEGMENTS`."""

    @property
    def allocated(self) -> int:
        """Return the sum of all categories."""
        return sum(self.segments.values())


SEGMENTS = ("kept", "gradient", "intermediate_tensors", "optimizer_state", "temporary")
"""What a step finds and keeps: parameters, input, optimizer state; gradients; what forward makes;
state that the optimizer makes; what backward and the optimizer make and drop again."""


@dataclass
class _Block:
    size: int
    born: str | None
    """The phase that allocated it, ``None`` where it was there before the step."""
    died: str | None = None
    """The phase that freed it."""

    @property
    def segment(self) -> str:
        if self.born is None:
            return "gradient" if self.died == "zero_grad" else "kept"
        if self.born == "forward":
            return "intermediate_tensors"
        kept = {"backward": "gradient", "step": "optimizer_state"}
        return "temporary" if self.died else kept.get(self.born, "temporary")


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
    # Each snapshot adds an event itself (SNAPSHOT of c10/cuda/CUDACachingAllocator.h).
    return [e for e in traces[torch.cuda.current_device()] if e["action"] != "snapshot"]


def _moments(
    trace: list[dict[str, Any]], before: int, begin: int, ends: dict[str, int]
) -> Iterator[Moment]:
    changes = list(_changes(trace, begin, ends))
    held = dict.fromkeys(SEGMENTS, 0)
    for _, _, _, block in changes:
        if block.born is None:
            held[block.segment] += block.size
    held["kept"] += before - sum(held.values())
    for number, phase, sign, block in changes:
        held[block.segment] += sign * block.size
        milliseconds = (trace[number]["time_us"] - trace[begin]["time_us"]) / 1000
        yield Moment(milliseconds, phase, dict(held))


def _changes(
    trace: list[dict[str, Any]], begin: int, ends: dict[str, int]
) -> Iterator[tuple[int, str, int, _Block]]:
    """Yield each event's number and phase, whether it adds or takes away, and the block."""
    live: dict[int, _Block] = {}
    for number, event in enumerate(trace[begin:], begin):
        phase = next(name for name, end in ends.items() if number < end)
        size = in_blocks(event["size"], itemsize=1)
        if event["action"] == "alloc":
            block = live[event["addr"]] = _Block(size, phase)
            yield number, phase, 1, block
        elif event["action"] == "free_completed":
            address = event["addr"]
            block = live.pop(address) if address in live else _Block(size, None)
            block.died = phase
            yield number, phase, -1, block
