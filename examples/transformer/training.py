"""A training step, and random data for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from examples.transformer.model import Config


def random_tokens(texts: int) -> Tensor:
    """Return a batch of that many texts, each one token longer than the model's context."""
    config = Config()
    return torch.randint(config.vocabulary, (texts, config.context + 1), device="cuda")


def train_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
    """Learn to continue ``tokens`` (batch, positions + 1); return the loss, without its graph."""
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()
