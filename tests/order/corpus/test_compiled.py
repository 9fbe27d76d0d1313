import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.gpumem


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("autocast", [False, True])
def test_block(autocast):
    compiled = torch.compile(Block().cuda())
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            compiled(torch.randn(2, 32, 64, device="cuda")).float().sum().backward()


def test_function():
    compiled = torch.compile(lambda x: (x.sin() + 1).cos().sum())
    x = torch.randn(1000, device="cuda", requires_grad=True)
    compiled(x).backward()


def test_not_compiled():
    model = torch.compile(nn.Linear(64, 64).cuda(), backend="eager")
    model(torch.randn(8, 64, device="cuda")).sum().backward()
