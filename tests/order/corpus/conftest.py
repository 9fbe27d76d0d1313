"""Fixtures of every scope, used by several modules."""

import pytest
import torch
from torch import nn


@pytest.fixture(scope="session")
def vocabulary():
    return nn.Embedding(1000, 64, device="cuda")


@pytest.fixture(scope="package")
def table(vocabulary):
    return vocabulary.weight.detach().repeat(4, 1)


@pytest.fixture(scope="module")
def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda()
    layer(torch.randn(2, 16, 64, device="cuda"))
    return layer


@pytest.fixture(scope="class")
def trained():
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def batch():
    yield torch.randn(32, 64, device="cuda")
    torch.cuda.synchronize()


@pytest.fixture
def widened(batch):
    return batch.repeat(1, 4)
