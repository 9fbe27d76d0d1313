"""The memory of training; the plugin finds forward, backward and step itself."""

from __future__ import annotations

import pytest
from torch.optim import AdamW

from examples.transformer.model import Transformer
from examples.transformer.training import random_tokens, train_step


@pytest.mark.gpumem(
    max="400MiB",
    max_leak=0,
    phases={"forward": "350MiB", "backward": "400MiB", "step": "200MiB"},
    baseline=True,
)
def test_two_steps(model: Transformer) -> None:
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        train_step(model, optimizer, random_tokens(4))


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(1, marks=pytest.mark.gpumem(max="200MiB")),
        pytest.param(2, marks=pytest.mark.gpumem(max="200MiB")),
        pytest.param(8, marks=pytest.mark.gpumem(max="700MiB")),
    ],
)
def test_batch_size(model: Transformer, batch: int) -> None:
    optimizer = AdamW(model.parameters(), lr=1e-3)
    train_step(model, optimizer, random_tokens(batch))


@pytest.mark.gpumem(max_leak=0, baseline=False)
def test_history(model: Transformer) -> None:
    """A list of losses keeps numbers, not the graphs behind them."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    history = [train_step(model, optimizer, random_tokens(1)) for _ in range(3)]
    assert not any(loss.requires_grad for loss in history)
