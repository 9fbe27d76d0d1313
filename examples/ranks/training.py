"""A decoder that is trained under ``fully_shard``: each rank keeps a part of every parameter."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 12, 1024, 16, 8192, 512


class Decoder(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def sharded(model: nn.Module) -> nn.Module:
    """Shard ``model``, block by block, so that no more than one or two are whole at a time."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = [] if os.getenv("EXAMPLE_REGRESSION") else [nn.TransformerEncoderLayer]
    for module in model.modules():
        if type(module) in wrapped:
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def step() -> None:
    """Train for two steps, as one of the ranks that torchrun starts."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("meta"):
        model = Decoder()
    parallel = sharded(model)
    parallel.to_empty(device="cuda")
    optimizer = AdamW(parallel.parameters(), lr=1e-4)
    for _ in range(2):
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), device="cuda")
        logits = parallel(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
