"""Training steps under ``torch.compile``, each after one that compiled and tuned its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from scenarios import Scenario

Make = Callable[[], tuple[nn.Module, torch.Tensor]]


class Block(nn.Module):
    """A block of a transformer with dropout, of 4 heads."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` is (batch, length, width)."""
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(x.shape)))
        inner = functional.gelu(self.up(self.norms[1](x)))
        result: torch.Tensor = x + self.drop(self.down(inner))
        return result


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """Three layers and what is between them."""
    layers = nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.SiLU(), nn.Linear(2048, 8)
    return nn.Sequential(*layers).cuda(), torch.ones(64, 512, device="cuda")


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Convolution, batch norm and pooling."""
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
    last = nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, *last).cuda(), torch.ones(8, 3, 64, 64, device="cuda")


def block() -> tuple[nn.Module, torch.Tensor]:
    """One block, in float32."""
    return Block().cuda(), torch.ones(4, 128, 256, device="cuda")


def block_of_halves() -> tuple[nn.Module, torch.Tensor]:
    """One block, in bfloat16."""
    return Block().cuda().bfloat16(), torch.ones(4, 128, 256, device="cuda", dtype=torch.bfloat16)


def stepping(make: Make, *, casts: bool = False, **options: Any) -> Callable[[], Any]:
    """Return a program that trains what ``make`` makes for two steps, compiled."""

    def run() -> Any:
        model, inputs = make()
        compiled: Any = torch.compile(model, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=casts):
                loss = compiled(inputs).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, inputs

    return run


def scenarios() -> Iterator[Scenario]:
    """Yield every program, with and without autocast, and one with dynamic sizes."""
    for make in (perceptron, convolutions, block, block_of_halves):
        name = f"compiled/{make.__name__.replace('_', ' ')}"
        yield Scenario(name, stepping(make), __name__, is_warmed=True)
        casting = stepping(make, casts=True)
        yield Scenario(f"{name}, autocast", casting, __name__, is_warmed=True)
    dynamic = stepping(block, dynamic=True)
    yield Scenario("compiled/block, dynamic", dynamic, __name__, is_warmed=True)
