from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from examples.transformer.model import Config, Transformer

RandomTokens = Callable[[int], Tensor]


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(Config()).cuda()


@pytest.fixture
def random_tokens() -> RandomTokens:
    """Make a batch of texts, each one token longer than the context."""

    def make(batch: int) -> Tensor:
        config = Config()
        return torch.randint(config.vocabulary, (batch, config.context + 1), device="cuda")

    return make
