"""A training step of GPT-2 small: simulated, on bare ``meta`` tensors, and on a device, in one run.

``python benchmarks/training_step.py [--layers N] [--device dry]`` prints their times and ratios:
processor time of all threads, which other programs disturb least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import on_device
import torch
import torch.nn.functional as F
from torch import nn

from pytest_gpumem import simulate

BATCH, CONTEXT, WIDTH, HEADS, VOCABULARY = 8, 1024, 768, 12, 50257


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) -> the same."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) -> the same."""
        x = x + self.attention(self.norm1(x))
        mixed: torch.Tensor = x + self.mlp(self.norm2(x))
        return mixed


class Gpt2(nn.Module):
    """GPT-2 with tied embeddings; 124 million parameters with 12 layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, context) -> logits (batch, context, vocabulary)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def training_step(device: str, layers: int) -> Callable[[], None]:
    """Return a function that does one step with AdamW on ``device``."""
    with torch.device(device):
        model = Gpt2(layers)
        tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], repeats: int = 7) -> float:
    """Median processor time of a step, after one that is not counted."""
    step()
    durations = []
    for _ in range(repeats):
        start = time.process_time()
        step()
        durations.append(time.process_time() - start)
    return statistics.median(durations)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    on_device.add_device(parser)
    arguments = parser.parse_args()
    layers = arguments.layers
    real = seconds(training_step("cuda", layers)) if arguments.device else None
    torch.cuda.empty_cache()
    bare = seconds(training_step("meta", layers))
    with simulate("A100-80GB") as gpu:
        simulated = seconds(training_step("cuda", layers))
    size = f"{layers} layers, {BATCH} x {CONTEXT} tokens"
    print(f"GPT-2 training step, {size}, torch {torch.__version__}")
    print(f"  bare meta tensors {bare * 1000:8.1f} ms")
    print(f"  simulated GPU     {simulated * 1000:8.1f} ms   {simulated / bare:.2f} x bare")
    if real is not None:
        ratio = f"{simulated / real:.2f} x as fast as simulated"
        print(f"  {arguments.device:<18}{real * 1000:8.1f} ms   {ratio}")
    print(f"  peak allocated    {gpu.peak_allocated:,} B, {len(gpu.trace):,} allocator events")


if __name__ == "__main__":
    main()
