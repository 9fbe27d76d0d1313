"""A small language model under torch.compile: one training step of many.

Recorded: bcrafton/assignment2-systems 0c0e8a73, benchmarking_script.py (the model is the course's
cs336_basics/model.py), batch 1, 64 tokens, float32, in the eleventh step. Gradients are never
cleared, and the optimizer is written by hand and runs eagerly, as does the loss. The call of einx
that torch.compile does not follow is a graph break here: what einx returned there is a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH, INNER, LAYERS, HEADS = 50_257, 64, 768, 3072, 12, 12


class Product(nn.Module):
    """Linear without bias, by einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T``."""
        return torch.einsum("...a,ba->...b", x, self.weight)


class Table(nn.Module):
    """An embedding, by indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the table."""
        return self.weight[x, :]


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight."""
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotation(nn.Module):
    """Rotary positions, shared by all layers."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        frequencies = 10_000 ** -(torch.arange(0, size, 2) / size)
        angles = torch.einsum("t,f->tf", torch.arange(LENGTH).float(), frequencies)
        table = torch.stack((torch.cos(angles), torch.sin(angles)))
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` rotated."""
        first, second = x.unflatten(-1, (-1, 2)).permute(4, 0, 1, 2, 3)
        cos, sin = self.table[:, positions]
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        return torch.stack((turned_first, turned_second), dim=-1).flatten(-2).contiguous()


def softmax(x: Tensor) -> Tensor:
    """By hand."""
    below = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(below)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked attention by products."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    weights = softmax(torch.where(mask, scores, float("-inf")))
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.q, self.k, self.v = (Product(WIDTH, WIDTH) for _ in range(3))
        self.out = Product(WIDTH, WIDTH)
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        batch, length, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        positions = torch.arange(length, device=x.device)
        torch._dynamo.graph_break()
        positions = positions.expand(batch, 1, length)
        q = self.rotation(q, positions)
        k = self.rotation(k, positions)
        order = torch.arange(length, device=x.device)
        mask = order.view(1, 1, length, 1) >= order.view(1, 1, 1, length)
        result = attend(q, k, v, mask)
        projected: Tensor = self.out(result.transpose(1, 2).flatten(-2).contiguous())
        return projected


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = Product(WIDTH, INNER), Product(WIDTH, INNER)
        self.w2 = Product(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        first = self.w1(x)
        result: Tensor = self.w2(first * torch.sigmoid(first) * self.w3(x))
        return result


class Block(nn.Module):
    """One layer."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.attention = Attention(rotation)
        self.feed_forward = FeedForward()
        self.norm1, self.norm2 = Norm(), Norm()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        attended = x + self.attention(self.norm1(x))
        result: Tensor = attended + self.feed_forward(self.norm2(attended))
        return result


class Model(nn.Module):
    """The language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        rotation = Rotation()
        self.rotation = rotation
        self.blocks = nn.ModuleList(Block(rotation) for _ in range(LAYERS))
        self.norm = Norm()
        self.head = Product(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def cross_entropy(x: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy by hand."""
    negative = -log_softmax(x)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def log_softmax(x: Tensor) -> Tensor:
    """By hand."""
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class Adam(torch.optim.Optimizer):
    """AdamW by hand: every state is made anew."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    def step(self) -> None:  # type: ignore[override]  # no closure here
        """Update every parameter that has a gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            grad = parameter.grad.data
            state = self.state[parameter]
            t = state.get("t", 1)
            m_before = state.get("m", torch.zeros_like(grad))
            v_before = state.get("v", torch.zeros_like(grad))
            m = 0.9 * m_before + (0.1 * grad)
            v = 0.999 * v_before + (0.001 * torch.square(grad))
            rate = 1e-4 * (math.sqrt(1 - 0.999**t) / (1 - 0.9**t))
            parameter.data -= rate * m / (torch.sqrt(v) + 1e-8)
            parameter.data -= 1e-6 * parameter.data
            state["m"] = m
            state["v"] = v
            state["t"] = t + 1


def training(start: Callable[[], None], steps: int = 3) -> list[Any]:
    """The last of some steps; from the second on they are alike."""
    model = Model().to("cuda")
    model.compile()
    optimizer = Adam(model.parameters())
    for _ in range(steps - 1):
        _step(model, optimizer)
    start()
    _step(model, optimizer)
    return [model, optimizer]


def _step(model: nn.Module, optimizer: Adam) -> None:
    x = torch.randint(0, VOCABULARY, (1, LENGTH)).to("cuda")
    y = torch.randint(0, VOCABULARY, (1, LENGTH)).to("cuda")
    p = model(x)
    loss = cross_entropy(p, y)
    loss = loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
