"""Modules whose allocations depend on random numbers of torch, which no test seeds."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpumem


class Experts(nn.Module):
    """A mixture of experts: each token goes to the two that its router prefers."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, tokens):
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        result = torch.zeros_like(tokens)
        for at, expert in enumerate(self.experts):
            own, place = (chosen == at).nonzero(as_tuple=True)
            result.index_add_(0, own, expert(tokens[own]) * weights[own, place, None])
        return result


@pytest.fixture(scope="module")
def experts():
    return Experts().cuda()


def test_new_experts():
    Experts().cuda()(torch.randn(128, 64, device="cuda")).square().mean().backward()


@pytest.mark.parametrize("tokens", [64, 128])
def test_shared_experts(experts, tokens):
    experts(torch.randn(tokens, 64, device="cuda")).sum().backward()
    experts.zero_grad()
