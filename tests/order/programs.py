"""Programs whose peaks must not depend on the way they are run on a simulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def _blocks(count: int = 4, width: int = 256) -> nn.Sequential:
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        ]
    ).cuda()


def _trained(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def perceptron() -> None:
    """Two steps in float32."""
    model = _blocks()
    _trained(model, lambda: model(torch.randn(512, 256, device="cuda")).mean())


def mixed() -> None:
    """Two steps under autocast."""
    model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).cuda()

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out: Tensor = model(torch.randn(8, 128, 256, device="cuda"))
        return out.float().mean()

    _trained(model, loss)


def checkpointed() -> None:
    """Two steps whose first checkpoint imports torch's compilers."""
    model = _blocks()

    def loss() -> Tensor:
        x = torch.randn(8, 64, 256, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
        return x.float().mean()

    _trained(model, loss)


def compiled() -> None:
    """Two steps of compiled code."""
    model = _blocks(2)
    forward = torch.compile(model)
    _trained(model, lambda: forward(torch.randn(256, 256, device="cuda")).mean())


def cyclic() -> None:
    """Tensors in reference cycles, which only the garbage collector frees."""
    for _ in range(2000):
        cycle: list[object] = [torch.empty(4096, device="cuda")]
        cycle.append(cycle)


def failing() -> None:
    """Exceptions whose tracebacks are part of cycles."""

    def fail() -> None:
        tensor = torch.empty(1 << 20, device="cuda")
        try:
            raise ValueError(tensor.shape)
        except ValueError as error:
            kept = error
        assert kept

    for _ in range(5):
        fail()


def convolutional() -> None:
    """A forward and a backward pass of convolutions."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()).cuda()
    _trained(model, lambda: model(torch.randn(4, 3, 64, 64, device="cuda")).mean())


def recurrent() -> None:
    """Two steps of an LSTM."""
    model = nn.LSTM(64, 128, 2).cuda()
    _trained(model, lambda: model(torch.randn(16, 4, 64, device="cuda"))[0].mean())


def captured() -> None:
    """A CUDA graph, replayed."""
    x = torch.randn(512, 512, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (x @ x).softmax(-1)
    graph.replay()


def decoding() -> None:
    """Attention whose cache grows."""
    with torch.inference_mode():
        keys = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.float16)
        for _ in range(8):
            keys = torch.cat([keys, keys[:, :, -1:]], dim=2)
            F.scaled_dot_product_attention(keys[:, :, -1:], keys, keys)


def streamed() -> None:
    """Work on a side stream."""
    side = torch.cuda.Stream()
    x = torch.randn(1 << 18, device="cuda")
    with torch.cuda.stream(side):
        x.record_stream(side)
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    y.sum()


def short_of_memory() -> None:
    """A failed allocation that the program catches."""
    kept = torch.zeros(1 << 20, device="cuda")
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.zeros(1 << 40, device="cuda")
    kept.clone()


PROGRAMS = (
    *(perceptron, mixed, checkpointed, compiled, cyclic, failing, convolutional, recurrent),
    *(captured, decoding, streamed, short_of_memory),
)
