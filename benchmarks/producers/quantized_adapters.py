"""A language model of 4-bit weights with adapters of low rank: one forward and backward pass.

Recorded: cranberrii/ftcourse 9f4902cf, Instrumenting_a_training_step_napkin_math.ipynb: TinyLlama
1.1B, whose weights the kernels of bitsandbytes unpack for every product, 1000 tokens, torch 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from producers.grouped_heads import repeated, rotate

VOCABULARY = 32_000
WIDTH, INNER, LAYERS = 2048, 5632, 22
HEADS, KEY_HEADS, HEAD = 32, 4, 64
RANK, BLOCK = 16, 64


def frozen(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """A weight that is not trained; its values do not matter."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="cuda"), requires_grad=False)


class Unpacked(torch.autograd.Function):
    """``MatMul4Bit`` of bitsandbytes: the unpacked weight lives for the time of a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantized) -> Tensor:
        """``x @ weight.T``; the graph keeps ``x`` beyond its backward."""
        ctx.kept = x, weight
        return F.linear(x, weight.unpacked().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of ``x``."""
        (gradient,), (_, weight) = gradients, ctx.kept
        return torch.matmul(gradient, weight.unpacked().to(gradient.dtype)), None


class Quantized(nn.Module):
    """A linear layer of 4-bit weights without bias: ``Linear4bit`` of bitsandbytes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape = outputs, inputs
        loaded = self.unpacked()
        self.largest = frozen(loaded.numel() // BLOCK, dtype=torch.float32)
        self.packed = frozen(loaded.numel() // 2, 1, dtype=torch.uint8)
        self.code = frozen(16, dtype=torch.float32)

    def unpacked(self) -> Tensor:
        """What the kernels read and write, in 16 bits."""
        return torch.empty(self.shape, dtype=torch.float16, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T``."""
        return Unpacked.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]  # torch's


class Adapted(nn.Module):
    """A quantized layer and its adapter: ``lora.Linear4bit`` of peft."""

    def __init__(self, base: Quantized) -> None:
        super().__init__()
        outputs, inputs = base.shape
        self.base = base
        self.dropout = nn.Dropout(0.05)
        self.a = nn.Linear(inputs, RANK, bias=False, device="cuda")
        self.b = nn.Linear(RANK, outputs, bias=False, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        """What the layer gives, and the adapter's part."""
        result: Tensor = self.base(x)
        result = result.clone()
        output = self.b(self.a(self.dropout(x))) * 2.0
        total: Tensor = result + output
        del result, output
        return total


class KeptMean(torch.autograd.Function):
    """The mean of rows, whose input torch 2.1 keeps for backward; later ones keep its sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Of the last dim."""
        ctx.save_for_backward(x)
        return x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The same for every element of a row."""
        shape = ctx.saved_tensors[0].shape
        gradient: Tensor = gradients[0].expand(shape) / shape[-1]
        return gradient


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = frozen(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` over its root mean square, times the weight."""
        variance = KeptMean.apply(x.pow(2))  # type: ignore[no-untyped-call]  # torch's
        x = x * torch.rsqrt(variance + 1e-5)
        output: Tensor = self.weight * x
        return output


class Rotation(nn.Module):
    """Angles of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = frozen(HEAD // 2, dtype=torch.float32)

    @torch.no_grad()
    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines."""
        each = positions[:, None, :].float()
        angles = (self.frequencies[None, :, None] @ each).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()


class Attention(nn.Module):
    """Grouped queries; queries and values have adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.out = Quantized(WIDTH, KEY_HEADS * HEAD), Quantized(WIDTH, WIDTH)
        self.plain_q, self.plain_v = Quantized(WIDTH, WIDTH), Quantized(WIDTH, KEY_HEADS * HEAD)

    def finish(self) -> None:
        """What is put on the GPU after the weights."""
        self.rotation = Rotation()

    def adapt(self) -> None:
        """Put adapters around the layers of queries and values."""
        self.q, self.v = Adapted(self.plain_q), Adapted(self.plain_v)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """The layer's output."""
        batch, length, _ = x.shape
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        q = q.view(batch, length, HEADS, HEAD).transpose(1, 2)
        k = k.view(batch, length, KEY_HEADS, HEAD).transpose(1, 2)
        v = v.view(batch, length, KEY_HEADS, HEAD).transpose(1, 2)
        cos, sin = self.rotation(positions)
        q, k = rotate(q, k, cos, sin)
        k = repeated(k, HEADS // KEY_HEADS)
        v = repeated(v, HEADS // KEY_HEADS)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).contiguous().view(batch, length, WIDTH)
        output: Tensor = self.out(attended)
        return output


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down = Quantized(INNER, WIDTH)
        self.gate, self.up = Quantized(WIDTH, INNER), Quantized(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Layer(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.feed_forward = Norm(), FeedForward()
        self.norm2, self.attention = Norm(), Attention()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """The layer's output."""
        before = x
        x = self.norm1(x)
        x = self.attention(x, positions)
        x = before + x
        before = x
        x = self.norm2(x)
        x = self.feed_forward(x)
        return before + x


class Model(nn.Module):
    """The language model."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.table = frozen(VOCABULARY, WIDTH), frozen(VOCABULARY, WIDTH)
        # The file has its weights in the order of their names.
        loaded = {name: Layer() for name in sorted(map(str, range(LAYERS)))}
        self.layers = nn.ModuleList(loaded[str(at)] for at in range(LAYERS))
        self.norm = Norm()
        attentions = [module for module in self.modules() if isinstance(module, Attention)]
        for attention in attentions:
            attention.finish()
        self.widen()
        for attention in attentions:
            attention.adapt()

    def widen(self) -> None:
        """``prepare_model_for_kbit_training`` of peft: what is not quantized becomes float32."""
        norms = [module.weight for module in self.modules() if isinstance(module, Norm)]
        for parameter in (self.table, *norms, self.head):
            parameter.data = parameter.data.to(torch.float32)

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads; the embedded tokens ask for a gradient."""
        x = F.embedding(tokens, self.table).requires_grad_()
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        for layer in self.layers:
            x = layer(x, positions)
        output: Tensor = self.norm(x)
        return output

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of the next tokens, and logits."""
        x = self.hidden(tokens)
        logits = F.linear(x, self.head)
        before = logits[..., :-1, :].contiguous()
        after = tokens[..., 1:].contiguous()
        loss = F.cross_entropy(before.view(-1, VOCABULARY), after.view(-1))
        return loss, logits


def one_pass(batch: int, length: int, start: Callable[[], None]) -> list[Any]:
    """Load the model, and run it forward and backward."""
    model = Model()
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
    start()
    loss, logits = model(tokens)
    loss.backward()
    return [model, tokens, loss, logits]


def forward_and_backward(start: Callable[[], None]) -> list[Any]:
    """The notebook's first pass, then the one recorded."""
    one_pass(4, 1200, start=lambda: None)
    torch.cuda.empty_cache()
    return one_pass(1, 1000, start)
