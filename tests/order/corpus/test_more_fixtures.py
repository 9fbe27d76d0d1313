import pytest
import torch

pytestmark = pytest.mark.gpumem


def test_same_fixtures(vocabulary, encoder):
    encoder(vocabulary(torch.arange(32, device="cuda")).view(1, 32, 64)).sum().backward()


def test_of_the_package_again(table):
    table.clone()


def test_workspace_of_a_fixture(encoder, batch):
    encoder.linear1(batch)
