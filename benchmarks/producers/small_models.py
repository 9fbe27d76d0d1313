"""One large Linear; seventeen steps of a tiny network.

Recorded: shreyansh26/MLSys-Experiments 16debf2b, model_memory_usage/profile_grad.py;
Da1sypetals/tomi f289cabb (the program is not in the repository: read from its trace).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def large_linear() -> list[Any]:
    """Three forward passes; returns what lives at the end."""
    model = nn.Linear(10_000, 50_000, device="cuda")
    for _ in range(3):
        inputs = torch.randn(5_000, 10_000, device="cuda")
        outputs = model(inputs)
    return [model, inputs, outputs]


def tiny_steps(start: Any) -> list[Any]:
    """Training steps without an optimizer's state; ``start()`` is where recording began."""
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1)).cuda()
    inputs = torch.randn(64, 10, device="cuda")
    targets = torch.randn(64, 1, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    measure = nn.MSELoss()
    start()
    for _ in range(17):
        outputs = model(inputs)
        loss = measure(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model, inputs, targets, outputs, loss]
