"""Data parallelism with replicas: DDP, an optimizer whose state is divided, by torch and by hand.

- ``recipe``: pytorch/tutorials, recipes_source/zero_redundancy_optimizer.rst (of torch 1.8, whose
  Adam went parameter by parameter);
- ``perceptron``: ``ddp_vs_fsdp.py`` and ``mlp.py`` beside the "Notes on FSDP";
- ``first``: brandon-snider/cs336-a2 49cf3d4a, cs336_systems/ddp_benchmarking.py;
- ``second``: damek/cs336-assignment2-systems 749e9687,
  cs336_systems/benchmarking_scripts/optimizer_state_sharding_accounting.py.

The last two train the 1.998 billion parameters of the model in ``language_model``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from producers.language_model import VOCABULARY, Model, cross_entropy

with warnings.catch_warnings():
    # Its functional optimizers are scripted, which torch itself calls deprecated.
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer


def recipe(zero: bool) -> list[int]:
    """Highest bytes after the model, after DDP, before and after the step."""
    peaks = []
    model = nn.Sequential(*[nn.Linear(2000, 2000).to(0) for _ in range(20)])
    peaks.append(torch.cuda.max_memory_allocated())
    # torch 1.8 begins with buckets of 1 and 25 MiB, later ones only where they look for unused
    # parameters (``_ddp_init_helper``).
    parallel = DistributedDataParallel(model, device_ids=[0], find_unused_parameters=True)
    peaks.append(torch.cuda.max_memory_allocated())
    optimizer: torch.optim.Optimizer
    if zero:
        # torch 1.8 hands parameters out in their order, and no longer the largest first: of weights
        # one after the other Adam still has the last one's denominator when it computes the next.
        # Where each is a group of its own there is nothing to sort, and nothing is kept.
        groups = [{"params": [parameter]} for parameter in parallel.parameters()]
        optimizer = ZeroRedundancyOptimizer(
            groups, optimizer_class=torch.optim.Adam, lr=0.01, foreach=False
        )
    else:
        optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01, foreach=False)
    outputs = parallel(torch.randn(20, 2000).to(0))
    labels = torch.randn(20, 2000).to(0)
    nn.MSELoss()(outputs, labels).backward()
    peaks.append(torch.cuda.max_memory_allocated())
    optimizer.step()
    peaks.append(torch.cuda.max_memory_allocated())
    return peaks


def perceptron(kind: str) -> int:
    """Highest bytes while six layers of 8192 train, ``"DDP"``, ``"FSDP1"`` or ``"FSDP2"``."""
    # Random numbers for 1.5 GiB on the host say nothing about memory.
    layers: list[nn.Module] = [nn.utils.skip_init(nn.Linear, 8192, 8192)]
    for _ in range(5):
        layers += [nn.ReLU(), nn.utils.skip_init(nn.Linear, 8192, 8192)]
    model: Any = nn.Sequential(*layers)
    if kind == "FSDP1":
        policy = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cuda", 0)
        )
    elif kind == "FSDP2":
        for layer in layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        model = fully_shard(model.to("cuda"))
    else:
        model = DistributedDataParallel(model.to("cuda"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    y = torch.empty(256, 8192).to("cuda")
    x = torch.empty(256, 8192).to("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        predicted = model(x)
        loss = functional.mse_loss(predicted, y)
        loss.backward()
        optimizer.step()
        loss.item()
    return torch.cuda.max_memory_allocated()


# Optimizers whose state is divided by hand.


class AdamW(torch.optim.Optimizer):
    """The course's: a tensor for every intermediate, zeros even where a state is there."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self) -> None:  # type: ignore[override]  # no closure here
        """Update every parameter that has a gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.data
            state = self.state[parameter]
            old_m = state.get("m", torch.zeros_like(gradient))
            old_v = state.get("v", torch.zeros_like(gradient))
            m = 0.9 * old_m + (0.1 * gradient)
            v = 0.999 * old_v + (0.001 * torch.square(gradient))
            parameter.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
            parameter.data -= 1e-5 * parameter.data
            state["m"] = m
            state["v"] = v


class Divided:
    """AdamW over this rank's parameters, which the others get from it afterwards."""

    def __init__(self, parameters: Iterable[nn.Parameter], owner: Callable[[int], int]) -> None:
        self.owners = {parameter: owner(parameter.numel()) for parameter in parameters}
        rank = dist.get_rank()
        self.optimizer = AdamW([p for p, owner in self.owners.items() if owner == rank])

    def step(self) -> None:
        """Update, then tell."""
        self.optimizer.step()
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter.data, src=owner)


def by_size() -> Callable[[int], int]:
    """The rank with the fewest elements so far."""
    held = [0] * dist.get_world_size()

    def owner(elements: int) -> int:
        rank = held.index(min(held))
        held[rank] += elements
        return rank

    return owner


def by_turns() -> Callable[[int], int]:
    """One rank after the other."""
    turns = count()
    return lambda _: next(turns) % dist.get_world_size()


def first(divided: bool, steps: int = 2) -> list[int]:
    """Highest bytes of the model, then in the last step before and in its update."""
    model = Model("xl").to("cuda")
    peaks = [_peak()]
    parameters = list(model.parameters())
    optimizer = Divided(parameters, by_size()) if divided else AdamW(parameters)
    for parameter in parameters:
        dist.broadcast(parameter.data, src=0)
    for _ in range(steps):
        x = torch.randint(0, VOCABULARY, (8, 128), device="cuda")
        y = torch.randint(0, VOCABULARY, (8, 128), device="cuda")
        for parameter in parameters:
            parameter.grad = None
        logits = model(x)
        loss = cross_entropy(logits, y)
        loss.backward()
        for parameter in parameters:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.mul_(0.5)
        before = _peak()
        optimizer.step()
        after = _peak()
    return [*peaks, before, after]


def _peak() -> int:
    """The highest bytes since the last call."""
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def second(length: int, divided: bool, steps: int = 2) -> list[int]:
    """Highest bytes of the model, then what is allocated before and after the last update."""
    model = Model("xl", length=length).to("cuda")
    parameters = list(model.parameters())
    optimizer = Divided(parameters, by_turns()) if divided else AdamW(parameters)
    for tensor in (*parameters, *model.buffers()):
        dist.broadcast(tensor.data, src=0)
    pending: list[tuple[nn.Parameter, Any]] = []

    def reduce(parameter: nn.Parameter) -> None:
        pending.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(reduce)
    peak = torch.cuda.max_memory_allocated()
    x, y = (torch.empty((2, length), dtype=torch.long, device="cuda") for _ in range(2))
    for _ in range(steps):
        parts = _scattered(x, length), _scattered(y, length)
        logits = model(x)
        loss = cross_entropy(logits, y)
        loss.backward()
        for parameter, work in pending:
            work.wait()
            assert parameter.grad is not None
            parameter.grad.div_(2)
        pending.clear()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        after = torch.cuda.memory_allocated()
    del parts, logits, loss
    return [peak, before, after]


def _scattered(into: Tensor, length: int) -> list[Tensor] | None:
    """Rank 0 holds the whole batch and its parts."""
    if dist.get_rank():
        dist.scatter(into, src=0)
        return None
    whole = torch.zeros((4, length), dtype=torch.long).to("cuda")
    parts = [part.contiguous() for part in whole.chunk(2, dim=0)]
    dist.scatter(into, scatter_list=parts, src=0)
    return [whole, *parts]
