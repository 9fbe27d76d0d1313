"""Four layers, einsum for every product, rotary tables on the CPU, a softmax and Adam by hand.

Recorded: NiuHuangxiaozi/assignment2-systems 9d868b9b, cs336_systems/profile_memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS, INNER, LONGEST = 10_000, 512, 4, 16, 1344, 256


class Product(nn.Module):
    """Linear without bias, by einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return torch.einsum("...a,ba->...b", x, self.weight)


class Table(nn.Module):
    """An embedding, by indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return self.weight[x]


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        dtype = x.dtype
        x = x.to(torch.float32)
        root = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        scaled = x / root * self.weight
        return scaled.to(dtype)


def softmax(x: Tensor) -> Tensor:
    """By hand, the powers twice."""
    highest, _ = torch.max(x, dim=-1, keepdim=True)
    return torch.exp(x - highest) / torch.sum(torch.exp(x - highest), dim=-1, keepdim=True)


class Rotation(nn.Module):
    """Rotary positions whose tables stay on the CPU."""

    sin: Tensor
    cos: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.zeros(LONGEST, WIDTH // HEADS // 2)
        self.register_buffer("sin", angles.sin())
        self.register_buffer("cos", angles.cos())

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        positions = torch.arange(x.shape[-2])
        sin = self.sin[positions].to("cuda")
        cos = self.cos[positions].to("cuda")
        wide_sin, wide_cos = sin[..., None], cos[..., None]
        x = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        first = wide_cos * x[..., :1] - wide_sin * x[..., 1:]
        second = wide_sin * x[..., :1] + wide_cos * x[..., 1:]
        rotated = torch.cat([first, second], dim=-1)
        return rotated.reshape(*rotated.shape[:-2], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked attention by products."""
    mask = mask.to(q.device)
    size = q.shape[-1]
    product = torch.einsum("abcd,abed->abce", q, k)
    scores = product / torch.sqrt(torch.tensor(size, device=product.device))
    masked = scores.masked_fill_(~mask.bool(), -float("inf"))
    weights = softmax(masked)
    return torch.einsum("abcd,abde->abce", weights, v)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = Rotation()
        self.q = Product(WIDTH, WIDTH)
        self.k = Product(WIDTH, WIDTH)
        self.v = Product(WIDTH, WIDTH)
        self.out = Product(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        length = x.shape[-2]
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = self._split(q)
        k = self._split(k)
        v = self._split(v)
        q = self.rotation(q)
        k = self.rotation(k)
        mask = torch.tril(torch.ones(length, length))
        o = attend(q, k, v, mask)
        o = o.permute(0, 2, 1, 3).reshape(*x.shape[:-1], WIDTH)
        out: Tensor = self.out(o)
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)


class Gate(nn.Module):
    """SiLU by hand."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return x * torch.sigmoid(x)


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = Product(WIDTH, INNER)
        self.w2 = Product(INNER, WIDTH)
        self.w3 = Product(WIDTH, INNER)
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        a = self.w1(x)
        b = self.gate(a)
        c = self.w3(x)
        both = b * c
        out: Tensor = self.w2(both)
        return out


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        normed = self.norm1(x)
        attended = self.attention(normed)
        middle = attended + x
        normed_middle = self.norm2(middle)
        fed = self.feed_forward(normed_middle)
        output: Tensor = fed + middle
        return output


class Model(nn.Module):
    """The language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = Product(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        output: Tensor = self.head(x)
        return output


class Adam(torch.optim.Optimizer):
    """Adam by hand: a tensor for every intermediate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "m": torch.zeros_like(parameter.data),
                "v": torch.zeros_like(parameter.data),
                "t": 0,
            }

    def step(self) -> None:  # type: ignore[override]  # no closure here
        """Update every parameter that has a gradient."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            t = state["t"] + 1
            rate = 1e-3 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            if parameter.grad is None:
                continue
            gradient = parameter.grad.data
            m = state["m"]
            new_m = 0.9 * m + 0.1 * gradient
            state["m"] = new_m
            v = state["v"]
            new_v = 0.999 * v + 0.001 * gradient**2
            state["v"] = new_v
            state["t"] = t
            parameter.data = parameter.data - rate * (new_m / (torch.sqrt(new_v) + 1e-8))
            parameter.data = parameter.data - 1e-3 * 0.0 * parameter.data


class Loss(nn.Module):
    """Cross entropy by hand, through one-hot targets."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The layer's output."""
        highest, _ = torch.max(x, dim=-1, keepdim=True)
        log = x - highest - torch.log(torch.sum(torch.exp(x - highest), dim=-1, keepdim=True))
        one_hot = torch.zeros_like(log)
        one_hot.scatter_(-1, target.unsqueeze(-1), 1)
        return -torch.sum(one_hot * log) / x.shape[0]


def forward(length: int, autocast: bool = False) -> list[Any]:
    """Three forward passes; returns what lives at the end."""
    model = Model()
    data = torch.randint(0, VOCABULARY, (10, length)).to("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            model(data)
    return [model, data]


def training(length: int) -> list[Any]:
    """Three training steps; returns what lives at the end."""
    model = Model()
    optimizer = Adam(model.parameters())
    data = torch.randint(0, VOCABULARY, (10, length)).to("cuda")
    labels = torch.randint(0, VOCABULARY, (10,)).to("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(data)
        predicted = logits[:, -1, :]
        loss = Loss()(predicted, labels)
        loss.backward()
        optimizer.step()
    return [model, optimizer, data, labels, logits, predicted, loss]
