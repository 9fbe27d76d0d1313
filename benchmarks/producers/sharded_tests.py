"""The bodies of PyTorch's tests of FSDP's memory, which state it.

- ``flat``: test/distributed/fsdp/test_fsdp_memory.py, MiB allocated as somebody read them off,
  compared there to 1 MiB;
- ``per_parameter``: test/distributed/_composable/fsdp/test_fully_shard_memory.py, upper bounds of
  active MB (1000-based), made from the numbers of elements; its model is the ``Transformer`` of
  torch/testing/_internal/distributed/_tensor/common_dtensor.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MIB = 2**20


class Convolutions(nn.Module):
    """A stem, three wide convolutions and a head; each batch norm is a unit of its own."""

    def __init__(self, width: int, shard: bool, checkpoints: bool) -> None:
        super().__init__()

        def norm(channels: int) -> nn.Module:
            layer = nn.BatchNorm2d(channels)
            return FullyShardedDataParallel(layer) if shard else layer

        self.stem: nn.Module = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=3), norm(64), nn.ReLU(inplace=True)
        )
        blocks: list[nn.Module] = []
        for channels in (64, width, width):
            blocks.append(nn.Conv2d(channels, width, kernel_size=5, padding=2))
            blocks += [norm(width), nn.ReLU(inplace=True)]
        self.blocks: nn.Module = nn.Sequential(
            *blocks, nn.AdaptiveAvgPool2d(output_size=(1, 1)), nn.Flatten()
        )
        self.head: nn.Module = nn.Linear(width, 10)
        self.checkpoints = checkpoints
        if shard:
            self.stem = FullyShardedDataParallel(self.stem)
            self.blocks = FullyShardedDataParallel(self.blocks)
            self.head = FullyShardedDataParallel(self.head)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        middle = self.stem(x)
        if self.checkpoints:
            middle = checkpoint(self.blocks, middle, use_reentrant=True)
        else:
            middle = self.blocks(middle)
        scores: Tensor = self.head(middle)
        return scores


def flat(checkpoints: bool, iterations: int = 2) -> dict[str, int]:
    """MiB allocated, cuBLAS's workspaces dropped, at the test's points of each iteration."""
    seen = {}

    def note(point: str) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        seen[point] = round(torch.cuda.memory_allocated() / MIB)

    batch = torch.randn(2, 3, 224, 224).to("cuda")
    model = FullyShardedDataParallel(Convolutions(128, True, checkpoints).to("cuda"))
    measure = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for i in range(iterations):
        note(f"iter {i}: start")
        out: Any = model(batch)
        note(f"iter {i}: after fwd")
        out = sum(o.sum() for o in out[0])
        loss = measure(out, torch.tensor(0.0).to("cuda"))
        note(f"iter {i}: after loss")
        loss.backward()
        note(f"iter {i}: after bwd")
        optimizer.step()
        note(f"iter {i}: after step")
        model.zero_grad(set_to_none=True)
        note(f"iter {i}: done")
    return seen


def flat_expected(checkpoints: bool, iterations: int = 2) -> dict[str, int]:
    """What the test states: 4 MiB of model on two ranks, and what was read off."""
    shard = 2
    expected: dict[str, int] = {}
    for i in range(iterations):
        later = shard if i else 0
        forward = (51 if checkpoints else 340) + later
        expected |= {
            f"iter {i}: start": shard + 1 + later,
            f"iter {i}: after fwd": forward,
            f"iter {i}: after loss": forward,
            f"iter {i}: after bwd": 2 * shard + 1 + later,
            f"iter {i}: after step": 3 * shard + 1,
            f"iter {i}: done": 2 * shard + 1,
        }
    return expected


class Attention(nn.Module):
    """Causal attention with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        output = functional.scaled_dot_product_attention(q, k, v, None, 0.1, is_causal=True)
        output = output.transpose(1, 2).reshape(batch, length, -1)
        attended: Tensor = self.dropout(self.wo(output))
        return attended


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ffn_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        h = x + self.attention(self.attention_norm(x))
        output: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return output


class Transformer(nn.Module):
    """Embeddings of 32 words and 16 positions, layers, a norm and logits."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(32, width), nn.Embedding(16, width)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        positions = torch.arange(0, tokens.shape[1], device=tokens.device)
        h = self.dropout(self.words(tokens) + self.positions(positions))
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.output(self.norm(h)).float()
        return logits


def per_parameter(reshard: bool) -> Iterator[tuple[str, float, float]]:
    """Points of one step, with the bound and what is there, in MB above what was before."""
    linear = nn.Linear(768, 768, device="cuda")
    linear(torch.randn(1, 768, device="cuda")).sum().backward()
    torch.cuda.empty_cache()
    base = _active("peak")
    model = Transformer(layers=3, width=768, heads=12)
    whole = sum(p.numel() for p in model.parameters()) * 4 / 1e6
    block = sum(p.numel() for p in model.layers[0].parameters()) * 4 / 1e6
    part, rest = whole / 2, whole - 3 * block
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    yield "init, peak", part + block + 4, _active("peak") - base
    yield "init", part + block, _active("current") - base
    loss = model(torch.randint(0, 32, (1, 4), device="cuda"))
    forward = part + 3 * block + rest if reshard else part + whole + block
    yield "forward", forward + 16, _active("peak") - base
    loss.sum().backward()
    backward = 2 * part + 3 * block + rest if reshard else part + whole + 1.5 * block
    yield "backward", backward + 16, _active("peak") - base
    del loss
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    yield "step", 4 * part + 16, _active("peak") - base
    optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    yield "gradients freed", 3 * part + 32, _active("peak") - base


def _active(kind: str) -> int:
    """Active MB, rounded as the test rounds them."""
    active: int = torch.cuda.memory_stats()[f"active_bytes.all.{kind}"]
    return round(active / 1e6)
