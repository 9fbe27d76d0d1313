"""The programs behind measured peaks of single operators, in plain PyTorch, written anew.

The measurements are those of Liger-Kernel's benchmark (linkedin/Liger-Kernel, benchmark/data): each
row is one operator, mode and size. A program sets up what lived while a row was measured, also
what its script built and did not use: the module of the kernel that PyTorch's was compared with
(``rival``). Left out is what the script's earlier runs left behind in some recordings: modules
that torch.compile held (embedding on the A100: 12 GiB) and remainders of cached blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Row = dict[str, str]
Config = dict[str, Any]
Call = Callable[[], Any]


def _dtype(config: Config) -> torch.dtype:
    return getattr(torch, config.get("dtype", "torch.float32").removeprefix("torch."))  # type: ignore[no-any-return]


def _made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


def _given(forward: Call, gradient: Tensor, rival: object = None) -> Call:
    """Forward and backward with a gradient that lives all the time, as a rival does."""

    def full(_: object = rival) -> None:
        forward().backward(gradient, retain_graph=True)

    return full


def _asked(row: Row, forward: Callable[[], Tensor]) -> Call:
    """What was timed or measured: forward alone, or with its backward."""
    return forward if row["mode"] == "forward" else lambda: forward().backward()


def _of_logits(config: Config) -> int:
    return int(config["B"]) * int(config["T"])


def cross_entropy(row: Row, config: Config) -> Call:
    """Cross entropy of logits and its backward."""
    tokens, vocabulary = _of_logits(config), int(row["x"])
    x = _made(tokens, vocabulary)
    target = torch.randint(vocabulary, (tokens, 1), device="cuda").squeeze(1)
    return lambda: functional.cross_entropy(x, target).backward()


def kl_div(row: Row, config: Config) -> Call:
    """Divergence of two distributions and its backward."""
    tokens, vocabulary = _of_logits(config), int(row["x"])
    x = _made(tokens, vocabulary).log_softmax(dim=-1)
    target = torch.randn(tokens, vocabulary, device="cuda").softmax(dim=-1)
    measure = nn.KLDivLoss(reduction="batchmean")
    return lambda: measure(x, target).backward(retain_graph=True)


def _jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
    measure = nn.KLDivLoss(reduction="batchmean", log_target=True)
    mean = torch.lerp(teacher.exp(), student.exp(), 0.5)
    loss: Tensor = 0.5 * measure(torch.log(mean), teacher) + 0.5 * measure(torch.log(mean), student)
    return loss


def jsd(row: Row, config: Config) -> Call:
    """Jensen-Shannon divergence and its backward."""
    tokens, vocabulary = _of_logits(config), int(row["x"])
    student = _made(tokens, vocabulary).log_softmax(dim=-1)
    teacher = torch.randn(tokens, vocabulary, device="cuda").log_softmax(dim=-1)
    return lambda: _jensen_shannon(student, teacher).backward(retain_graph=True)


def tvd(row: Row, config: Config) -> Call:
    """Total variation distance and its backward."""
    tokens, vocabulary = _of_logits(config), int(row["x"])
    x = _made(tokens, vocabulary).softmax(dim=-1)
    target = torch.randn(tokens, vocabulary, device="cuda").softmax(dim=-1)

    def distance() -> Tensor:
        halved = torch.abs(x - target) / 2.0
        return torch.sum(halved) / tokens

    return lambda: distance().backward(retain_graph=True)


def fused_linear_cross_entropy(row: Row, config: Config) -> Call:
    """The last linear layer of a language model and its loss."""
    hidden, vocabulary, dtype = config["H"], config["V"], _dtype(config)
    layer, rival = (
        nn.Linear(hidden, vocabulary, bias=False, dtype=dtype, device="cuda") for _ in range(2)
    )
    x = _made(int(row["x"]), hidden, dtype=dtype)
    target = torch.randint(vocabulary, (int(row["x"]),), device="cuda")

    def forward(_: Any = rival) -> Tensor:
        return functional.cross_entropy(layer(x), target)

    return _asked(row, forward)


def fused_linear_jsd(row: Row, config: Config) -> Call:
    """The last linear layers of two language models and the divergence of what they say."""
    hidden, vocabulary, dtype = config["H"], config["V"], _dtype(config)
    student, teacher, *rivals = (
        nn.Linear(hidden, vocabulary, bias=False, dtype=dtype, device="cuda") for _ in range(4)
    )
    for layer, rival in zip((student, teacher), rivals, strict=True):
        layer.weight.data = rival.weight.data = torch.rand_like(layer.weight)
    seen, told = (torch.rand(int(row["x"]), hidden, dtype=dtype, device="cuda") for _ in range(2))
    seen.requires_grad_(True)

    def divergence(_: Any = rivals) -> Tensor:
        logits = student(seen), teacher(told)
        said, meant = [torch.log_softmax(each / 1.0, dim=-1) for each in logits]
        wide = meant.to(torch.float32)
        return _jensen_shannon(said.to(torch.float32), wide).to(dtype)

    return _asked(row, divergence)


def layer_norm(row: Row, config: Config) -> Call:
    """Layer norm over rows."""
    size = int(row["x"])
    x = torch.randn(config["M"], size, device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    rival, layer = (nn.LayerNorm(size, eps=config["eps"]).cuda() for _ in range(2))
    return _given(lambda: layer(x), gradient, rival)


def group_norm(row: Row, config: Config) -> Call:
    """Group norm; every mode was measured forward and backward."""
    channels = int(row["x"])
    groups = channels // config["channels_per_group"]
    rival, layer = (nn.GroupNorm(groups, channels, eps=config["eps"]).cuda() for _ in range(2))
    x = torch.randn(config["M"], channels, config["H"], dtype=_dtype(config), device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return _given(lambda: layer(x), gradient, rival)


def _root_mean_square(x: Tensor, eps: float) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + eps)


def rms_norm(row: Row, config: Config) -> Call:
    """Root mean square norm as Llama computes it: in float32."""
    rows, size, dtype = config["M"], int(row["x"]), _dtype(config)
    rival, weight = (nn.Parameter(torch.ones(size, device="cuda")) for _ in range(2))
    x = torch.randn(rows, size, dtype=dtype, device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def forward() -> Tensor:
        wide = x.to(torch.float32)
        wide = _root_mean_square(wide, config["eps"])
        return weight * wide.to(dtype)

    return _given(forward, gradient, rival)


def fused_add_rms_norm(row: Row, config: Config) -> Call:
    """A sum with the residual and its root mean square norm; two rivals."""
    rows, size, eps = config["M"], int(row["x"]), config["eps"]
    weight, *rivals = (nn.Parameter(torch.ones(size, device="cuda")) for _ in range(4))
    x, residual, *gradients = (torch.randn(rows, size, device="cuda") for _ in range(4))
    x.requires_grad_(True)
    residual.requires_grad_(True)

    def full(_: Any = rivals) -> None:
        added = x + residual
        normed = weight * _root_mean_square(added, eps)
        torch.autograd.backward((normed, added), gradients)

    return full


def softmax(row: Row, config: Config) -> Call:
    """Softmax of one row."""
    x = _made(int(row["x"]), dtype=_dtype(config))

    def full() -> None:
        y = functional.softmax(x, dim=-1)
        y.backward(torch.ones_like(y), retain_graph=True)

    return full


def relu_squared(row: Row, config: Config) -> Call:
    """The square of a ReLU of one row."""
    x = _made(int(row["x"]), dtype=_dtype(config))

    def full() -> None:
        y = torch.square(functional.relu(x))
        y.backward(torch.ones_like(y), retain_graph=True)

    return full


def sparsemax(row: Row, config: Config) -> Call:
    """The projection onto the simplex, by sorting."""
    size = int(row["x"])
    x = torch.randn(_of_logits(config), size, dtype=_dtype(config), device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def forward() -> Tensor:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        ranks = torch.arange(1, size + 1, device="cuda", dtype=x.dtype).view(1, size)
        bound = 1 + ranks * ordered
        support = bound > sums
        count = support.sum(dim=-1, keepdim=True).clamp(min=1)
        total = (ordered * support).sum(dim=-1, keepdim=True)
        threshold = (total - 1) / count
        return torch.clamp(x - threshold, min=0)

    return _given(forward, gradient)


def embedding(row: Row, config: Config) -> Call:
    """A table of vectors, and the gradient of its rows."""
    size, width = int(row["x"]), config["D"]
    table, rival = (nn.Embedding(size, width, device="cuda") for _ in range(2))
    indices = torch.randint(0, size, (config["B"], config["T"]), device="cuda")

    def full(_: Any = rival) -> None:
        output = table(indices)
        output.backward(torch.randn_like(output))

    return full


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)


def rope(row: Row, config: Config) -> Call:
    """Rotary positions of queries and keys; ``x`` is the hidden size or the length."""
    hidden = config["hidden_size"] if row["x_name"] == "T" else int(row["x"])
    length = config["seq_len"] if row["x_name"] == "H" else int(row["x"])
    dtype, width = _dtype(config), hidden // config["num_q_heads"]
    frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2, device="cuda").float() / width)
    heads = (config["num_q_heads"], config["num_kv_heads"])
    inputs = [_made(1, length, count, width, dtype=dtype).transpose(1, 2) for count in heads]
    gradients = [torch.randn_like(x) for x in inputs]
    positions = torch.arange(length, device="cuda").unsqueeze(0)
    angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    both = torch.cat((angles, angles), dim=-1)
    cosine, sine = both.cos().to(dtype), both.sin().to(dtype)
    del angles, both

    def full(_: Any = (frequencies, positions)) -> None:
        along, across = cosine.unsqueeze(1), sine.unsqueeze(1)
        outputs = [x * along + _turned(x) * across for x in inputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True, retain_graph=True)

    return full


class GatedLayer(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self, hidden: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        inner = self.activation(self.gate(x)) * self.up(x)
        output: Tensor = self.down(inner)
        return output


def _gated(row: Row, config: Config, activation: Callable[[Tensor], Tensor]) -> Call:
    hidden, dtype = config["hidden_size"], _dtype(config)
    layer = GatedLayer(hidden, config["intermediate_size"], activation).to("cuda").to(dtype)
    batch = config["bsz"] if "bsz" in config else config["B"]
    x = _made(batch, int(row["x"]), hidden, dtype=dtype)
    if row["mode"] == "forward":
        # Both threads of the process had made their workspaces in earlier runs.
        warm = torch.ones(2, 2, device="cuda", requires_grad=True)
        (warm @ warm).sum().backward()
        del warm
        return lambda: layer(x)
    if row["mode"] == "backward":
        output = layer(x)
        return _given(lambda: output, torch.randn_like(output))

    def full() -> None:
        output = layer(x)
        output.backward(torch.randn_like(output), retain_graph=True)

    return full


def geglu(row: Row, config: Config) -> Call:
    """The gated layer with GELU."""
    return _gated(row, config, lambda x: functional.gelu(x, approximate="tanh"))


def swiglu(row: Row, config: Config) -> Call:
    """The gated layer with SiLU."""
    return _gated(row, config, functional.silu)


OPERATORS: dict[str, Callable[[Row, Config], Call]] = {
    program.__name__: program
    for program in (
        cross_entropy,
        embedding,
        fused_add_rms_norm,
        fused_linear_cross_entropy,
        fused_linear_jsd,
        geglu,
        group_norm,
        jsd,
        kl_div,
        layer_norm,
        relu_squared,
        rms_norm,
        rope,
        softmax,
        sparsemax,
        swiglu,
        tvd,
    )
}
"""Sets up one row; the result is what is measured. Other operators of a table are not compared."""
