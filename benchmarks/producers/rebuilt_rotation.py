"""A language model that builds its rotary table anew in every layer; a forward pass in training.

Recorded: notHanmin/assignment2-systems bbd29721, cs336_systems/benchmarking_script.py, batch 4,
256 tokens, one of the later steps with AdamW under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH = 10_000, 4, 256
WIDTH, INNER, LAYERS, HEADS = 1600, 6400, 48, 25


def product(weight: Tensor, x: Tensor) -> Tensor:
    """``x @ weight.T``, by einsum as in the recorded program.

    Without autocast it is what einsum of torch 2.6 made of it, whose backward pass is another one
    than that of later releases. Under autocast, where einsum casts the weight first, only forward
    passes were recorded, and these are the same in all. A compiler traces the parts that einsum of
    the release that runs has: there, too, it is what 2.6 made of it.
    """
    if torch.is_autocast_enabled("cuda") and not torch.compiler.is_compiling():
        return torch.einsum("oi,bti->bto", weight, x)
    batch, length, inputs = x.shape
    columns = x.permute(2, 0, 1).reshape(1, inputs, batch * length)
    whole = torch.bmm(weight.unsqueeze(0), columns)
    return whole.view(-1, batch, length).permute(1, 2, 0)


def matrix(outputs: int, inputs: int) -> nn.Parameter:
    """A weight."""
    return nn.Parameter(torch.empty(outputs, inputs))


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight."""
        mean = (x**2).mean(-1, keepdim=True)
        root = torch.sqrt(mean + 1e-5)
        return (x / root) * self.weight


class Rotation(nn.Module):
    """Rotary positions whose table is computed on the GPU."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: int, length: int) -> None:
        super().__init__()
        multiples = torch.arange(0, size, 2, device="cuda", dtype=torch.float32)
        exponents = multiples / size
        frequencies = 1.0 / (10_000**exponents)
        positions = torch.arange(length, device="cuda", dtype=torch.float32)
        angles = torch.einsum("a,b->ab", positions, frequencies)
        cos, sin = torch.cos(angles), torch.sin(angles)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` rotated."""
        cos = self.cos[positions]
        sin = self.sin[positions]
        x1 = x[..., 0::2]
        x2 = x[..., 1::2]
        wide_cos, wide_sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first = x1 * wide_cos - x2 * wide_sin
        second = x1 * wide_sin + x2 * wide_cos
        rotated = torch.empty_like(x)
        rotated[..., 0::2] = first
        rotated[..., 1::2] = second
        return rotated


def softmax(x: Tensor) -> Tensor:
    """By hand."""
    highest = torch.max(x, dim=-1, keepdim=True).values
    shifted = x - highest
    powers = torch.exp(shifted)
    total = torch.sum(powers, dim=-1, keepdim=True)
    return powers / total


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked attention by products."""
    scores = torch.einsum("abcd,abed->abce", q, k)
    masked = torch.where(mask, scores, -torch.inf)
    weights = softmax(masked / math.sqrt(q.shape[-1]))
    return torch.einsum("abcd,abde->abce", weights, v)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (matrix(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        whole_q = product(self.q, x)
        whole_k = product(self.k, x)
        whole_v = product(self.v, x)
        batch, length, _ = x.shape
        q = whole_q.reshape(batch, length, HEADS, -1).permute(0, 2, 1, 3)
        k = whole_k.reshape(batch, length, HEADS, -1).permute(0, 2, 1, 3)
        v = whole_v.reshape(batch, length, HEADS, -1).permute(0, 2, 1, 3)
        positions = torch.arange(length, device=x.device)
        many = positions.unsqueeze(0).expand(batch, -1)
        rotation = Rotation(WIDTH // HEADS, length)
        rotated_q = rotation.forward(q, many)
        rotated_k = rotation.forward(k, many)
        mask = torch.tril(torch.ones((length, length), device=x.device, dtype=torch.bool))
        attended = attend(rotated_q, rotated_k, v, mask)
        combined = attended.permute(0, 2, 1, 3).reshape(batch, length, -1)
        return product(self.out, combined)


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            matrix(INNER, WIDTH),
            matrix(WIDTH, INNER),
            matrix(INNER, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        first = product(self.w1, x)
        third = product(self.w3, x)
        silu = first * torch.sigmoid(first)
        gated = silu * third
        return product(self.w2, gated)


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        x = x + self.attention(self.norm1(x))
        output: Tensor = x + self.feed_forward(self.norm2(x))
        return output


class Model(nn.Module):
    """The language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = matrix(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = matrix(VOCABULARY, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.table[x]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return product(self.head, x)


class Adam(torch.optim.Optimizer):
    """AdamW by hand, in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self) -> None:  # type: ignore[override]  # no closure here
        """Update every parameter that has a gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["m"] = torch.zeros_like(parameter)
                state["v"] = torch.zeros_like(parameter)
            m, v = state["m"], state["v"]
            gradient = parameter.grad.data
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            below = v.sqrt().add_(1e-8)
            parameter.data.addcdiv_(m, below, value=-1e-3)
            parameter.data.add_(parameter.data, alpha=-1e-5)


def forward(start: Callable[[], None]) -> list[Any]:
    """The forward pass of the third step; gradients of the second still live."""
    model = Model().to("cuda")
    optimizer = Adam(model.parameters())
    data = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda")
    for step in range(3):
        if step == 2:
            start()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(data)
        if step == 2:
            break
        loss = logits.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [model, optimizer, data, logits, loss]
