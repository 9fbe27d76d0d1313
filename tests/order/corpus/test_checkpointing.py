import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

pytestmark = pytest.mark.gpumem


def blocks(count=4, width=256):
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        ]
    ).cuda()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_blocks(reentrant, autocast):
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        x = torch.randn(8, 64, 256, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
        x.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("i", range(3))
def test_alike(i):
    model = nn.Sequential(*[k for _ in range(6) for k in (nn.Linear(256, 256), nn.GELU())]).cuda()
    for _ in range(2):
        x = torch.randn(1024, 256, device="cuda", requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_sequential(reentrant):
    x = torch.randn(128, 256, device="cuda", requires_grad=True)
    checkpoint_sequential(blocks(), 2, x, use_reentrant=reentrant).sum().backward()


def test_nested():
    model = blocks(2)

    def inner(x):
        return checkpoint(model[1], model[0](x), use_reentrant=False)

    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    checkpoint(inner, x, use_reentrant=False).sum().backward()


def test_early_stop_is_off():
    model = blocks(2)
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        checkpoint(model, x, use_reentrant=False).sum().backward()


def test_saved_on_the_cpu():
    model = blocks(2)
    with torch.autograd.graph.save_on_cpu():
        y = model(torch.randn(64, 256, device="cuda"))
    y.sum().backward()
