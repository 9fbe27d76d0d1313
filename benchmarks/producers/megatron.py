"""Megatron-LM's small GPT with tensor and pipeline parallelism, as its functional tests train it.

Written anew from NVIDIA/Megatron-LM (``transformer_impl: local``: megatron/core's own layers, no
Transformer Engine modules), its shapes and its order of operators; arguments are those of
tests/functional_tests/test_cases/gpt/*/model_config.yaml. The logging rank is the last one, so it
has the last pipeline stage. What Megatron fuses into one kernel is one function here that
allocates what the kernel returns and what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

LAYERS, WIDTH, HEADS, LENGTH, WORDS = 12, 512, 8, 1024, 50_257
MICRO_BATCH, GLOBAL_BATCH = 4, 32


@dataclass(frozen=True)
class Layout:
    """How the test divides the model, and what its container has."""

    tensor: int
    pipeline: int
    dtype: torch.dtype = torch.bfloat16
    fused: bool = True
    """Whether there are kernels for the masked softmax and for Adam."""

    @property
    def data(self) -> int:
        """Replicas among all ranks."""
        return dist.get_world_size() // (self.tensor * self.pipeline)

    @property
    def words(self) -> int:
        """Words of this rank's part of the vocabulary, padded to a multiple of 128 for each."""
        return math.ceil(WORDS / (128 * self.tensor)) * 128


def applied(function: Any, *arguments: Any) -> Tensor:
    """What an autograd function returns."""
    output: Tensor = function.apply(*arguments)
    return output


# tensor_parallel/layers.py.


class Product(Function):
    """LinearWithGradAccumulationAndAsyncCommunication: the bias is added by an operator of its own.

    A column's gradient of the input is reduced over the group.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
        """``x @ weight.T + bias``."""
        context.save_for_backward(x, weight)
        context.has_bias, context.group = bias is not None, group
        output = torch.matmul(x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input, of the weight and of the bias."""
        (gradient,) = gradients
        x, weight = context.saved_tensors
        of_input = gradient.matmul(weight)
        gradient = gradient.contiguous().view(-1, gradient.shape[-1])
        work = None
        if context.group is not None:
            work = dist.all_reduce(of_input, group=context.group, async_op=True)
        of_weight = gradient.t().matmul(x.view(-1, x.shape[-1]))
        of_bias = gradient.sum(dim=0) if context.has_bias else None
        if work is not None:
            work.wait()
        return of_input, of_weight, of_bias, None


class Column(nn.Module):
    """A linear layer divided by its outputs."""

    def __init__(self, inputs: int, outputs: int, layout: Layout, group: Any, adds: bool) -> None:
        super().__init__()
        self.group, self.adds = (group if layout.tensor > 1 else None), adds
        part = outputs // layout.tensor
        self.weight = nn.Parameter(torch.empty(part, inputs, device="cuda", dtype=layout.dtype))
        self.bias = nn.Parameter(torch.empty(part, device="cuda", dtype=layout.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The output, with the bias if that is not left to what follows."""
        return applied(Product, x, self.weight, self.bias if self.adds else None, self.group)


class Row(nn.Module):
    """A linear layer divided by its inputs; the bias is left to what follows."""

    def __init__(self, inputs: int, outputs: int, layout: Layout, group: Any) -> None:
        super().__init__()
        self.group = group if layout.tensor > 1 else None
        part = inputs // layout.tensor
        self.weight = nn.Parameter(torch.empty(outputs, part, device="cuda", dtype=layout.dtype))
        self.bias = nn.Parameter(torch.empty(outputs, device="cuda", dtype=layout.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The output, reduced over the group."""
        output = applied(Product, x, self.weight, None, None)
        return output if self.group is None else reduced(output, self.group)


class Reduce(Function):
    """A sum over the group in place; its gradient passes."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        """``x``, summed."""
        context.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient itself."""
        return gradients[0], None


def reduced(x: Tensor, group: Any) -> Tensor:
    """Summed over the group."""
    return applied(Reduce, x, group)


# fusions/.


class FusedSoftmax(Function):
    """ScaledUpperTriangMaskedSoftmax: keeps its result alone; the gradient is made in place."""

    @staticmethod
    def forward(context: Any, scores: Tensor) -> Tensor:
        """Probabilities."""
        result = torch.empty_like(scores)
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """The gradient's own storage."""
        return gradients[0]


class BiasGelu(Function):
    """One kernel each way, over input and bias."""

    @staticmethod
    def forward(context: Any, x: Tensor, bias: Tensor) -> Tensor:
        """GELU of the sum."""
        context.save_for_backward(x, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Twice the same; the engine sums the bias's to its shape."""
        gradient = torch.empty_like(gradients[0])
        return gradient, gradient


class BiasDropoutAdd(Function):
    """One kernel each way; keeps the mask of the dropout."""

    @staticmethod
    def forward(context: Any, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        """``residual + dropout(x + bias)``."""
        context.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(residual)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the product, of its bias and of the residual."""
        gradient = torch.empty_like(gradients[0])
        return gradient, gradient.sum(dim=(0, 1)), gradients[0]


# transformer/.


class Attention(nn.Module):
    """SelfAttention with DotProductAttention: scores are made into a buffer of the whole model."""

    buffer: Tensor | None = None

    def __init__(self, layout: Layout, group: Any) -> None:
        super().__init__()
        self.layout = layout
        self.heads = HEADS // layout.tensor
        self.linear_qkv = Column(WIDTH, 3 * WIDTH, layout, group, adds=True)
        self.linear_proj = Row(WIDTH, WIDTH, layout, group)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The output without the last bias."""
        mixed = self.linear_qkv(x).view(*x.shape[:2], self.heads, 3 * (WIDTH // HEADS))
        query, key, value = torch.split(mixed, WIDTH // HEADS, dim=3)
        context = self._attended(query, key, value, mask)
        output: Tensor = self.linear_proj(context)
        return output

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        length, batch = query.shape[:2]
        query = query.reshape(length, batch * self.heads, -1)
        key = key.reshape(length, batch * self.heads, -1)
        shape = (batch * self.heads, length, length)
        if Attention.buffer is None:
            Attention.buffer = torch.empty(shape, dtype=query.dtype, device="cuda")
        scores = torch.baddbmm(
            Attention.buffer,
            query.transpose(0, 1),
            key.transpose(0, 1).transpose(1, 2),
            beta=0.0,
            alpha=0.125,
        )
        probabilities = self._softmax(scores.view(batch, self.heads, length, length), mask)
        probabilities = functional.dropout(probabilities, 0.1)
        value = value.reshape(length, batch * self.heads, -1)
        context = torch.bmm(probabilities.view(*shape), value.transpose(0, 1))
        context = context.view(batch, self.heads, length, -1)
        context = context.permute(2, 0, 1, 3).contiguous()
        return context.view(length, batch, WIDTH // self.layout.tensor)

    def _softmax(self, scores: Tensor, mask: Tensor) -> Tensor:
        if self.layout.fused:
            return applied(FusedSoftmax, scores)
        scores = scores.float()
        scores = scores * 1.0
        scores.masked_fill_(mask, -10_000.0)
        probabilities = functional.softmax(scores, dim=-1)
        return probabilities.to(self.layout.dtype)


class Feed(nn.Module):
    """MLP."""

    def __init__(self, layout: Layout, group: Any) -> None:
        super().__init__()
        self.linear_fc1 = Column(WIDTH, 4 * WIDTH, layout, group, adds=False)
        self.linear_fc2 = Row(4 * WIDTH, WIDTH, layout, group)

    def forward(self, x: Tensor) -> Tensor:
        """The output without the last bias."""
        middle = self.linear_fc1(x)
        middle = applied(BiasGelu, middle, self.linear_fc1.bias)
        output: Tensor = self.linear_fc2(middle)
        return output


class Layer(nn.Module):
    """TransformerLayer."""

    def __init__(self, layout: Layout, group: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH, device="cuda", dtype=layout.dtype)
        self.self_attention = Attention(layout, group)
        self.pre_mlp_layernorm = nn.LayerNorm(WIDTH, device="cuda", dtype=layout.dtype)
        self.mlp = Feed(layout, group)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The layer's output."""
        attended = self.self_attention(self.input_layernorm(x), mask)
        x = applied(BiasDropoutAdd, attended, self.self_attention.linear_proj.bias, x)
        fed = self.mlp(self.pre_mlp_layernorm(x))
        return applied(BiasDropoutAdd, fed, self.mlp.linear_fc2.bias, x)


class Entropy(Function):
    """VocabParallelCrossEntropy, in place over a copy in float32."""

    @staticmethod
    def forward(context: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        """The loss of each token."""
        logits = logits.float()
        highest = torch.max(logits, dim=-1)[0]
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        logits -= highest.unsqueeze(dim=-1)
        outside = (target < 0) | (target >= logits.shape[-1])
        masked = target.clone() - 0
        masked[outside] = 0
        flat = logits.view(-1, logits.shape[-1])
        masked = masked.view(-1)
        numbers = torch.arange(start=0, end=flat.shape[0], device=flat.device)
        predicted = flat[numbers, masked].clone().contiguous().view_as(target)
        predicted[outside] = 0.0
        dist.all_reduce(predicted, group=group)
        torch.exp(logits, out=logits)
        total = logits.sum(dim=-1)
        dist.all_reduce(total, group=group)
        loss = torch.log(total) - predicted
        logits.div_(total.unsqueeze(dim=-1))
        context.save_for_backward(logits, outside, masked)
        return loss

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient in float32, in the storage of the probabilities."""
        softmax, outside, masked = context.saved_tensors
        flat = softmax.view(-1, softmax.shape[-1])
        numbers = torch.arange(start=0, end=flat.shape[0], device=flat.device)
        flat[numbers, masked] -= 1.0 - outside.view(-1).float()
        softmax.mul_(gradients[0].unsqueeze(dim=-1))
        return softmax, None, None


class Stage(nn.Module):
    """The last pipeline stage of GPTModel, or the whole of it."""

    received: Tensor | None = None
    """What the stage before sent last: ``set_input_tensor`` keeps it, and with it its gradient."""
    sent: Tensor | None = None
    """The gradient that went back last: a local of the schedule, until there is the next."""

    def __init__(self, layout: Layout, group: Any) -> None:
        super().__init__()
        self.layout, self.group = layout, group
        weight = torch.empty(layout.words, WIDTH, device="cuda", dtype=layout.dtype)
        if layout.pipeline == 1:
            self.words = nn.Parameter(weight)
            self.positions = nn.Embedding(LENGTH, WIDTH, device="cuda", dtype=layout.dtype)
        count = LAYERS // layout.pipeline
        self.layers = nn.ModuleList(Layer(layout, group) for _ in range(count))
        self.final_layernorm = nn.LayerNorm(WIDTH, device="cuda", dtype=layout.dtype)
        if layout.pipeline > 1:
            self.words = nn.Parameter(weight)

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """LanguageModelEmbedding in deterministic mode: rows by indexing."""
        if self.layout.tensor > 1:
            outside = (tokens < 0) | (tokens >= self.layout.words)
            tokens = tokens.clone() - 0
            tokens[outside] = 0
            words = self.words[tokens]
            words[outside, :] = 0.0
            words = reduced(words, self.group)
        else:
            words = self.words[tokens]
        both = (words + self.positions(positions)).transpose(0, 1).contiguous()
        return functional.dropout(both, 0.1)

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token, from what the stage before sent or from the embedding."""
        for layer in self.layers:
            x = layer(x, mask)
        x = self.final_layernorm(x)
        group = self.group if self.layout.tensor > 1 else None
        logits = applied(Product, x, self.words, None, group)
        labels = labels.transpose(0, 1).contiguous()
        loss = applied(Entropy, logits, labels, self.group)
        del logits
        return loss.transpose(0, 1).contiguous()


# distributed/ and optimizer/.


def gradient_buffer(stage: Stage) -> Tensor:
    """ParamAndGradBuffer: gradients are added to views of it, and dropped."""
    dtype = torch.float32 if stage.layout.dtype is torch.bfloat16 else stage.layout.dtype
    parameters = list(stage.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device="cuda")
    start = 0
    for parameter in parameters:
        view = buffer[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()

        def add(parameter: Tensor, main: Tensor = view) -> None:
            assert parameter.grad is not None
            main.add_(parameter.grad.data)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(add)
        parameter.main_grad = view  # type: ignore[attr-defined]  # Megatron's attribute
    return buffer


def train(layout: Layout, steps: int, overflows: int = 0) -> Iterator[tuple[int, int]]:
    """Bytes allocated after each of ``steps``, and the highest so far.

    The first ``overflows`` steps update nothing, as a loss scaled for halves begins.
    """
    ranks = dist.get_world_size()
    group = dist.new_group(range(ranks - layout.tensor, ranks))
    replicas = dist.new_group(
        range(ranks - 1, ranks - 1 - layout.tensor * layout.data, -layout.tensor)
    )
    Attention.buffer = None
    stage = Stage(layout, group)
    buffer = gradient_buffer(stage)
    parameters = list(stage.parameters())
    main = [p.detach().clone().float() for p in parameters]
    optimizer = torch.optim.AdamW(main, lr=1.5e-4, fused=layout.fused, foreach=not layout.fused)
    for step in range(steps):
        buffer.zero_()
        for one in main:
            one.grad = None
        for _ in range(GLOBAL_BATCH // MICRO_BATCH // layout.data):
            micro_batch(stage)
        dist.all_reduce(buffer, group=replicas)
        for one, parameter in zip(main, parameters, strict=True):
            one.grad = parameter.main_grad.float()  # type: ignore[attr-defined]
        if step >= overflows:
            optimizer.step()
            for one, parameter in zip(main, parameters, strict=True):
                parameter.data.copy_(one)
        yield torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def micro_batch(stage: Stage) -> None:
    """One forward and backward pass; the gradient of the input goes to the stage before."""
    layout = stage.layout
    labels = torch.zeros(MICRO_BATCH, LENGTH, device="cuda", dtype=torch.long)
    weights = torch.ones(MICRO_BATCH, LENGTH, device="cuda")
    mask = torch.zeros(MICRO_BATCH, 1, LENGTH, LENGTH, device="cuda", dtype=torch.bool)
    before = dist.get_rank() - dist.get_world_size() // layout.pipeline
    if layout.pipeline > 1:
        shape = (LENGTH, MICRO_BATCH, WIDTH)
        x = torch.empty(shape, device="cuda", dtype=layout.dtype, requires_grad=True)
        dist.recv(x.detach(), src=before)
        stage.received = x
    else:
        tokens, positions = torch.zeros_like(labels), torch.zeros_like(labels)
        x = stage.embedded(tokens, positions)
    losses = stage(x, mask, labels)
    loss = torch.sum(losses.view(-1).float() * weights.view(-1)) / LENGTH
    loss.backward()
    if layout.pipeline > 1:
        assert x.grad is not None
        stage.sent = x.grad
        dist.send(x.grad, dst=before)
