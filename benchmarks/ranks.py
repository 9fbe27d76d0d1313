"""Time and host memory of one rank's training step of Llama 3, under FSDP2 x tensor parallel.

``python benchmarks/ranks.py [8B|70B|405B]``: one of 512 ranks, 64 x 8, on a simulated H100,
bfloat16, full activation checkpointing, 8,192 tokens, AdamW. Prints seconds and the peaks.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pytest_gpumem import simulate

VOCABULARY, TOKENS = 128_256, 8_192
SIZES = {
    "8B": (4096, 32, 32, 8, 14_336),
    "70B": (8192, 80, 64, 8, 28_672),
    "405B": (16_384, 126, 128, 8, 53_248),
}
"""Width, layers, heads, heads of keys, width of the perceptron: arXiv 2407.21783, table 3."""


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.size, bias=False)
        self.wv = nn.Linear(width, groups * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, -1, self.size).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.wo(attended.transpose(1, 2).contiguous().view(batch, length, -1))
        return output


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        output: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return output


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, groups)
        self.feed_forward = FeedForward(width, inner)
        self.attention_norm = nn.RMSNorm(width)
        self.ffn_norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend and transform."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return output


class Llama(nn.Module):
    """The model."""

    def __init__(self, width: int, layers: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        blocks = (Block(width, heads, groups, inner) for _ in range(layers))
        self.layers = nn.ModuleList(map(checkpoint_wrapper, blocks))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


def _whole() -> Any:
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def parallelized(model: Llama) -> None:
    """Lay ``model`` out as torchtitan does: tensor and sequence parallel, then sharded."""
    mesh = init_device_mesh("cuda", (64, 8), mesh_dim_names=("dp", "tp"))
    ends: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        inside: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": _whole(),
            **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": _whole(),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        wrapped: Any = block
        parallelize_module(wrapped._checkpoint_wrapped_module, mesh["tp"], inside)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def main(name: str) -> None:
    """Run one step of the model called ``name``."""
    begin = time.perf_counter()
    with simulate("H100", world_size=512, rank=0) as gpu:
        with torch.device("meta"):
            model = Llama(*SIZES[name])
        parallelized(model)
        model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        made = time.perf_counter()
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS), device="cuda")
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{name}: made in {made - begin:.1f} s, a step in {end - made:.1f} s")
    print(f"  peak allocated {gpu.peak_allocated:,} B, reserved {gpu.peak_reserved:,} B")
    print(f"  host memory {host / 2**20:.2f} GiB")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "70B")
