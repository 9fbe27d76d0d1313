"""Two steps of every optimizer: over lists, one by one, fused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from scenarios import Scenario

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD momentum": ("SGD", {"momentum": 0.9}),
    "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": ("Adam", {}),
    "Adam amsgrad": ("Adam", {"amsgrad": True}),
    "Adam capturable": ("Adam", {"capturable": True}),
    "AdamW": ("AdamW", {}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
    "Adamax": ("Adamax", {}),
    "Adagrad": ("Adagrad", {}),
    "Adadelta": ("Adadelta", {}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop centered": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "Rprop": ("Rprop", {}),
    "ASGD": ("ASGD", {}),
    "Adafactor": ("Adafactor", {}),
}
FUSED = ("SGD", "SGD momentum", "Adam", "Adam amsgrad", "AdamW")
CLASSES_OF_NEWER_TORCH: dict[str, tuple[str, dict[str, Any]]] = {"Muon": ("Muon", {})}


def two_steps(name: str, settings: dict[str, Any], *, clips: bool = False) -> Any:
    """Return a program that trains a small network with it."""

    def run() -> Any:
        biased = name != "Muon"  # which takes matrices alone
        model = nn.Sequential(*[nn.Linear(500, 500, bias=biased) for _ in range(3)]).cuda()
        optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
        inputs = torch.ones(32, 500, device="cuda")
        for _ in range(2):
            model(inputs).sum().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, inputs

    return run


def scaled() -> Any:
    """Two steps in half precision with a GradScaler."""
    model = nn.Sequential(*[nn.Linear(500, 500) for _ in range(3)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    inputs = torch.ones(32, 500, device="cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(inputs).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, optimizer, scaler, inputs


def scenarios() -> Iterator[Scenario]:
    """Yield every optimizer in each of its ways."""
    for name, (kind, settings) in OPTIMIZERS.items():
        yield Scenario(f"optimizers/{name}", two_steps(kind, settings), __name__)
        if kind != "Adafactor":
            one_by_one = two_steps(kind, {**settings, "foreach": False})
            yield Scenario(f"optimizers/{name} one by one", one_by_one, __name__)
        if name in FUSED:
            fused = two_steps(kind, {**settings, "fused": True})
            yield Scenario(f"optimizers/{name} fused", fused, __name__)
    for name, (kind, settings) in CLASSES_OF_NEWER_TORCH.items():
        if hasattr(torch.optim, kind):
            yield Scenario(f"optimizers/{name}", two_steps(kind, settings), __name__)
    clipped = two_steps("AdamW", {}, clips=True)
    yield Scenario("optimizers/AdamW with clipped gradients", clipped, __name__)
    yield Scenario("optimizers/AdamW with a GradScaler", scaled, __name__)
