"""Programs under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from strangers import MIXED, Program
from strangers.regimes import Block, Model, loss_of, step, tokens


def _anew(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``run`` with nothing compiled in this process before."""

    def running() -> Any:
        torch._dynamo.reset()
        return run()

    return running


def compiled_training() -> None:
    model = Model(2).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model)
    for _ in range(2):
        step(compiled, optimizer, tokens())


def compiled_inference() -> None:
    model = torch.compile(Model(2).cuda().eval())
    with torch.no_grad():
        for _ in range(2):
            model(tokens()[:, :-1])


def compiled_blocks() -> None:
    model = Model(2).cuda()
    for block in model.blocks:
        block.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer, tokens())


def compiled_convolutions() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
    ).cuda()
    call = torch.compile(lambda given: F.adaptive_avg_pool2d(net(given), 1).flatten(1))
    for _ in range(2):
        call(torch.randn(4, 3, 32, 32, device="cuda")).square().mean().backward()


def compiled_with_other_sizes() -> None:
    model = torch.compile(Block().cuda(), dynamic=True)
    for length in (64, 80, 48):
        model(torch.randn(2, length, 128, device="cuda")).square().mean().backward()


def compiled_with_a_break() -> None:
    layers = [nn.Linear(128, 128).cuda() for _ in range(2)]

    @torch.compile
    def call(x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(layers[0](x))
        torch._dynamo.graph_break()
        made: torch.Tensor = layers[1](x).tanh()
        return made

    for _ in range(2):
        call(torch.randn(64, 128, device="cuda")).sum().backward()


def compiled_optimizer() -> None:
    model = Model(2).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    apply = torch.compile(optimizer.step)
    for _ in range(2):
        loss_of(model, tokens()).backward()
        apply()
        optimizer.zero_grad()


def compiled_checkpoints() -> None:
    model = Model(2, keeps="some").cuda()
    compiled = torch.compile(model)
    for _ in range(2):
        loss_of(compiled, tokens()).backward()


def compiled_with_dropout() -> None:
    block = Block(dropout=0.1).cuda()
    compiled = torch.compile(block)
    for _ in range(2):
        compiled(torch.randn(2, 64, 128, device="cuda")).square().mean().backward()


def compiled_losses() -> None:
    @torch.compile
    def lost(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores.float(), wanted) + scores.logsumexp(-1).square().mean()

    scores = torch.randn(64, 512, device="cuda", requires_grad=True)
    for _ in range(2):
        lost(scores, torch.randint(0, 512, (64,)).cuda()).backward()


def flexible_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cuda")
    call = torch.compile(flex_attention)
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3))
    for _ in range(2):
        call(q, k, v, block_mask=mask).sum().backward()


def compiled_by_graphs() -> None:
    net = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda()
    model = torch.compile(net.forward, mode="reduce-overhead")
    for _ in range(3):
        model(torch.randn(64, 128, device="cuda")).square().mean().backward()


def programs() -> Iterator[Program]:
    """Yield the programs of this file."""
    for run in (
        compiled_training, compiled_inference, compiled_blocks, compiled_convolutions,
        compiled_with_other_sizes, compiled_with_a_break, compiled_optimizer,
        compiled_checkpoints, compiled_with_dropout, compiled_losses, flexible_attention,
        compiled_by_graphs,
    ):  # fmt: skip
        ways = ("f32",) if run in (flexible_attention, compiled_by_graphs) else MIXED
        yield Program(run.__name__, _anew(run), ways, is_compiled=True)
