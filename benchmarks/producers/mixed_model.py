"""A language model that multiplies weights from the left: its first training step; forward passes.

Recorded: kkaitlyn111/cs336-a2-systems c1c174d1, cs336_systems/benchmark.py (the model is the one of
kkaitlyn111/cs336-assignment1, cs336_basics/transformer.py), batch 4, 2.7 billion parameters; the
small one under torch.compile, in its first call, 46eae3f8.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from producers.rebuilt_rotation import product

VOCABULARY, BATCH = 10_000, 4


@dataclass(frozen=True)
class Size:
    """How large the model is."""

    width: int
    inner: int
    layers: int
    heads: int


SMALL, LARGE = Size(768, 3072, 12, 12), Size(2560, 10_240, 32, 32)


class Product(nn.Module):
    """Linear without bias; its weight comes from the CPU."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T``."""
        return product(self.weight, x)


class Table(nn.Module):
    """An embedding, by indexing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, width, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the table."""
        return self.weight[x]


class Norm(nn.Module):
    """Root mean square norm through the vector norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(width, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight."""
        dtype = x.dtype
        x = x.to(torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        root = torch.sqrt(length**2 / self.width + 1e-5)
        normed = x / root
        result = torch.einsum("a,bca->bca", self.weight, normed)
        return result.to(dtype)


class Rotation(nn.Module):
    """Rotary positions, one for each layer."""

    table: Tensor

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        positions = torch.arange(length, device="cuda")
        columns = torch.arange(0, size, 2, device="cuda")
        frequencies = 1.0 / (10_000 ** (columns.float() / size))
        angles = torch.outer(positions, frequencies)
        table = torch.zeros(length, size // 2, 2, device="cuda")
        table[:, :, 0] = torch.cos(angles)
        table[:, :, 1] = torch.sin(angles)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` rotated."""
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        cos = self.table[positions, :, 0]
        sin = self.table[positions, :, 1]
        cos = cos.unsqueeze(1)
        sin = sin.unsqueeze(1)
        rotated = torch.zeros_like(pairs)
        rotated[..., 0] = cos * pairs[..., 0] - sin * pairs[..., 1]
        rotated[..., 1] = sin * pairs[..., 0] + cos * pairs[..., 1]
        return rotated.reshape(x.shape)


def softmax(x: Tensor) -> Tensor:
    """By hand."""
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(x - highest)
    total = torch.sum(powers, dim=-1, keepdim=True)
    return powers / total


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked attention by products."""
    scores = torch.einsum("abcd,abed->abce", q, k)
    scores = scores / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712  # the operator is what counts
    weights = softmax(scores)
    return torch.einsum("abcd,abde->abce", weights, v)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, length: int, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.q, self.k, self.v = (Product(size.width, size.width) for _ in range(3))
        self.out = Product(size.width, size.width)
        self.rotation = Rotation(length, size.width // size.heads)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        batch, length, _ = x.shape
        whole_q = self.q(x)
        whole_k = self.k(x)
        whole_v = self.v(x)
        q, k, v = (
            t.reshape(batch, length, self.heads, -1).permute(0, 2, 1, 3)
            for t in (whole_q, whole_k, whole_v)
        )
        positions = torch.arange(length, device=x.device).unsqueeze(0).expand(batch, -1)
        q = self.rotation(q, positions)
        k = self.rotation(k, positions)
        mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).to(torch.bool)
        mask = ~mask
        mask = mask.unsqueeze(0).unsqueeze(0).expand(batch, self.heads, -1, -1)
        result = attend(q, k, v, mask)
        result = result.permute(0, 2, 1, 3).reshape(batch, length, -1)
        projected: Tensor = self.out(result)
        del result
        return projected


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            Product(size.inner, size.width),
            Product(size.width, size.inner),
            Product(size.inner, size.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        first = self.w1(x)
        third = self.w3(x)
        gated = torch.sigmoid(first) * first
        both = gated * third
        result: Tensor = self.w2(both)
        return result


class Block(nn.Module):
    """One layer."""

    def __init__(self, length: int, size: Size) -> None:
        super().__init__()
        self.norm1 = Norm(size.width)
        self.attention = Attention(length, size)
        self.norm2 = Norm(size.width)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        h = self.norm1(x)
        h = self.attention(h)
        x = x + h
        h = self.norm2(x)
        h = self.feed_forward(h)
        output: Tensor = x + h
        del x
        return output


class Model(nn.Module):
    """The language model."""

    def __init__(self, length: int, size: Size = LARGE) -> None:
        super().__init__()
        self.table = Table(size.width)
        self.blocks = nn.ModuleList(Block(length, size) for _ in range(size.layers))
        self.norm = Norm(size.width)
        self.head = Product(VOCABULARY, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        del x
        return logits


class Adam(torch.optim.Optimizer):
    """AdamW by hand, in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    def step(self) -> None:  # type: ignore[override]  # no closure here
        """Update every parameter that has a gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.data
            state = self.state[parameter]
            if not state:
                state["m"] = torch.zeros_like(parameter.data)
                state["v"] = torch.zeros_like(parameter.data)
            m, v = state["m"], state["v"]
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            below = (v.sqrt() / math.sqrt(0.05)).add_(1e-8)
            parameter.data.addcdiv_(m, below, value=-1e-4)
            parameter.data.add_(parameter.data, alpha=-1e-6)


def cross_entropy(x: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy by hand."""
    x = x.reshape(-1, x.size(-1))
    targets = targets.reshape(-1)
    highest = torch.max(x, dim=-1, keepdim=True).values
    x = x - highest
    powers = torch.exp(x)
    total = powers.sum(dim=-1)
    rows = torch.arange(x.shape[0])
    chosen = x[rows, targets]
    losses = torch.log(total) - chosen
    return losses.mean()


def training(start: Callable[[], None]) -> list[Any]:
    """The first training step."""
    model = Model(128)
    model.to("cuda")
    optimizer = Adam(model.parameters())
    data = torch.randint(0, VOCABULARY, (BATCH, 128)).to("cuda")
    start()
    optimizer.zero_grad()
    logits = model(data)
    loss = cross_entropy(logits, data)
    loss.backward()
    optimizer.step()
    return [model, optimizer, data, logits, loss]


def forward(start: Callable[[], None]) -> list[Any]:
    """A forward pass under autocast of 256 tokens after one of 128, both with an empty cache."""
    _pass(128, lambda: None)
    return _pass(256, start)


def _pass(length: int, start: Callable[[], None]) -> list[Any]:
    model = Model(length)
    model.to("cuda")
    data = torch.randint(0, VOCABULARY, (BATCH, length)).to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        start()
        torch.cuda.empty_cache()
        logits = model(data)
    return [model, data, logits]


def compiled(start: Callable[[], None]) -> list[Any]:
    """The first call of the small model, compiled, under an autocast that float32 switches off."""
    model: Any = torch.compile(Model(128, SMALL))
    model.to("cuda")
    data = torch.randint(0, VOCABULARY, (BATCH, 128), device="cuda")
    start()
    torch.cuda.empty_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        context = torch.autocast("cuda", dtype=torch.float32)
    with context:
        logits = model(data)
    return [model, data, logits]
