"""A language model written from tensors, at several sizes: forward passes and training steps.

Several people recorded it, each with a loop of their own (batch 4, 10,000 words):

- ``step``: CliffKai/assignment2-systems 6051f1e4, cs336_systems/benchmark.py;
- ``inference`` and ``training``: Okazaki-Yumemi/CS336 98d27a5d, a2-systems/scripts/benchmark.py;
  Wedsonlin/assignment2-systems 8630bcfe, cs336_systems/nsys_profile.py (a later version of the
  model, whose rotary positions are a slice of the table);
- ``without_gradients``: aimetrics/assignment2-systems 61a3269f, benchmarking.py;
- ``twice``: sidsoc12/spring2024-assignment2-systems 12f3dcad, cs336_systems/memory_profiling.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH = 10_000, 128, 4
SIZES = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "xl": (1600, 6400, 48, 25),
    "2.7b": (2560, 10_240, 32, 32),
}
"""Width, inner width, layers, heads."""


class Product(nn.Module):
    """Linear without bias, by einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T``."""
        return torch.einsum("abc,dc->abd", x, self.weight)


class Table(nn.Module):
    """An embedding, by indexing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, width))

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the table."""
        return self.weight[x, :]


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight."""
        dtype = x.dtype
        x = x.to(torch.float32)
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * root
        return (self.weight * x).to(dtype)


class Rotation(nn.Module):
    """Rotary positions; one for the whole model."""

    table: Tensor

    def __init__(self, size: int, length: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, length, size // 2), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """``x`` rotated."""
        x1, x2 = x.reshape(*x.shape[:-1], -1, 2).permute(4, 0, 1, 2, 3)
        cos, sin = self.table[:, positions]
        first = cos * x1 - sin * x2
        second = sin * x1 + cos * x2
        result = torch.cat([first[..., None], second[..., None]], -1)
        return result.reshape(*first.shape[:-1], -1).contiguous()


class SlicedRotation(Rotation):
    """The same by a slice of the table."""

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """``x`` rotated."""
        x1, x2 = x.reshape(*x.shape[:-1], -1, 2).permute(4, 0, 1, 2, 3).unbind(0)
        cos, sin = self.table[:, : x.shape[-2], :].unbind(0)
        first = cos * x1 - sin * x2
        second = sin * x1 + cos * x2
        return torch.concat((first, second), dim=-1)


class ComputedRotation(Rotation):
    """The same by indices into the flat table, computed each time."""

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """``x`` rotated."""
        assert positions is not None
        x1, x2 = x.reshape(*x.shape[:-1], -1, 2).permute(4, 0, 1, 2, 3)
        cos, sin = self._rows(positions)
        first = cos * x1 - sin * x2
        second = sin * x1 + cos * x2
        result = torch.cat([first[..., None], second[..., None]], -1)
        return result.reshape(*first.shape[:-1], -1).contiguous()

    def _rows(self, positions: Tensor) -> Tensor:
        _, length, size = self.table.shape
        table = torch.arange(2, dtype=torch.int32, device=positions.device)[:, None]
        table = table * (length * size)
        row = positions * size
        start = table + row
        column = torch.arange(size, dtype=torch.int32, device=positions.device)
        index = start[:, :, None] + column
        found = self.table.reshape(-1)[index]
        del column, row, table, start, index
        return found


def softmax(x: Tensor) -> Tensor:
    """By hand."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked attention by products."""
    scores = torch.einsum("abcd,abed->abce", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("abcd,abde->abce", weights, v)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, width: int, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (Product(width, width) for _ in range(3))
        self.out = Product(width, width)
        self.rotation = rotation

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The layer's output; ``positions`` stands among the arguments, so it dies before q."""
        length = x.shape[1]
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        q, k, v = (t.reshape(*t.shape[:2], self.heads, -1).permute(0, 2, 1, 3) for t in (q, k, v))
        if not isinstance(self.rotation, SlicedRotation):
            positions = torch.arange(length, device=x.device)
        q = self.rotation(q, positions)
        k = self.rotation(k, positions)
        numbers = torch.arange(length, device=x.device)
        rows, columns = numbers[None, None, :, None], numbers[None, None, None, :]
        mask = rows >= columns
        attended = attend(q, k, v, mask)
        attended = attended.permute(0, 2, 1, 3).reshape(*x.shape).contiguous()
        output: Tensor = self.out(attended)
        return output


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            Product(width, inner),
            Product(inner, width),
            Product(width, inner),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        output: Tensor = self.w2(gate(self.w1(x)) * self.w3(x))
        return output


class ProjectedFirst(FeedForward):
    """Both projections before the gate; everything lives until the end."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        first = self.w1(x)
        third = self.w3(x)
        gated = gate(first) * third
        output: Tensor = self.w2(gated)
        return output


def gate(x: Tensor) -> Tensor:
    """SiLU by hand."""
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """One layer."""

    def __init__(
        self, width: int, heads: int, rotation: Rotation, feed_forward: FeedForward
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, rotation)
        self.feed_forward = feed_forward
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        attended = self.attention(self.norm1(x))
        middle = x + attended
        fed = self.feed_forward(self.norm2(middle))
        output: Tensor = middle + fed
        return output


class Model(nn.Module):
    """The language model."""

    def __init__(
        self,
        size: str,
        rotation: type[Rotation] = Rotation,
        feed_forward: type[FeedForward] = FeedForward,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        width, inner, layers, heads = SIZES[size]
        self.table = Table(width)
        self.keeps_embedding = rotation is SlicedRotation
        self.rotation = rotation(width // heads, length)
        self.blocks = nn.ModuleList(
            Block(width, heads, self.rotation, feed_forward(width, inner)) for _ in range(layers)
        )
        self.norm = Norm(width)
        self.head = Product(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        embedded = self.table(x)
        x = embedded
        if not self.keeps_embedding:
            del embedded
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        output: Tensor = self.head(x)
        return output


def step(size: str, trains: bool, start: Callable[[], None]) -> list[Any]:
    """One pass or step after ``start()``; returns what lives at the end."""
    model = Model(size).to("cuda")
    x = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to("cuda")
    y = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    measure = nn.CrossEntropyLoss()
    start()
    logits = model(x)
    alive = [model, x, y, optimizer, logits]
    if trains:
        loss = measure(logits.view(-1, logits.size(-1)), y.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        alive.append(loss)
    return alive


class Adam(torch.optim.Optimizer):
    """AdamW by hand: a tensor for every intermediate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self) -> None:  # type: ignore[override]  # no closure here
        """Update every parameter that has a gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.data
            state = self.state[parameter]
            parameter.data -= 1e-5 * parameter.data
            old_m = state.get("m", torch.zeros_like(gradient))
            old_v = state.get("v", torch.zeros_like(gradient))
            m = 0.9 * old_m + (0.1 * gradient)
            v = 0.999 * old_v + (0.001 * torch.square(gradient))
            parameter.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
            state["m"] = m
            state["v"] = v


def cross_entropy(x: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy by hand."""
    negative = -log_softmax(x)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def log_softmax(x: Tensor) -> Tensor:
    """By hand."""
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def tokens(*leading: int) -> Tensor:
    """Batches of tokens."""
    return torch.randint(0, VOCABULARY, (*leading, BATCH, LENGTH), device="cuda")


def inference(size: str, same: bool, start: Callable[[], None]) -> list[Any]:
    """A pass in inference mode after five of them, all over the same tokens or each its own."""
    model = Model(size, SlicedRotation).to("cuda")
    data = (tokens(1), tokens(1)) if same else (tokens(5), tokens(1))
    with torch.inference_mode():
        for i in range(5):
            model(data[0][0 if same else i])
        start()
        model(data[1][0])
    return [model, data]


def training(size: str, start: Callable[[], None]) -> list[Any]:
    """A training step after five of them."""
    model = Model(size, SlicedRotation).to("cuda")
    optimizer = Adam(model.parameters())
    warm, measured = tokens(5), tokens(1)
    warm_targets, measured_targets = tokens(5), tokens(1)
    for i in range(5):
        logits = model(warm[i])
        loss = cross_entropy(logits, warm_targets[i])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del logits, loss
    start()
    logits = model(measured[0])
    loss = cross_entropy(logits, measured_targets[0])
    loss.backward()
    optimizer.step()
    return [model, optimizer, warm, measured, warm_targets, measured_targets, logits, loss]


def without_gradients(size: str, start: Callable[[], None]) -> list[Any]:
    """A pass without gradients under autocast after two of them; each drops the one before."""
    model = Model(size, ComputedRotation, ProjectedFirst).to("cuda")
    x, y = tokens(), tokens()
    context = torch.autocast("cuda", dtype=torch.bfloat16)
    for i in range(3):
        if i == 2:
            start()
        with context, torch.no_grad():
            _ = model(x)
    return [model, x, y, _]


def twice(size: str, start: Callable[[], None]) -> list[Any]:
    """A pass with gradients while the logits of the one before still live."""
    with torch.device("cuda"):
        model = Model(size)
    model.to("cuda")
    x, y = tokens(), tokens()
    logits = model(x)
    start()
    logits = model(x)
    return [model, x, y, logits]
