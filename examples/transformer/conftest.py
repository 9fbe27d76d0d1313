from __future__ import annotations

import pytest
import torch

from examples.transformer.model import Config, Transformer


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(Config()).cuda()
