"""Each family of operators: forward, and backward where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scenarios import Scenario

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def x(*shape: int, dtype: torch.dtype = F32, grad: bool = True) -> Tensor:
    """Random numbers."""
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def positive(*shape: int) -> Tensor:
    """Random numbers between 0 and 1."""
    return torch.rand(shape, device="cuda").clamp_(0.01, 0.99).requires_grad_()


def index(high: int, *shape: int) -> Tensor:
    """Random indices."""
    return torch.randint(high, shape, device="cuda")


def module(make: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = F32) -> Any:
    """Return a program that trains a module once."""

    def run() -> Any:
        layer = make().to("cuda", dtype)
        inputs = x(*shape, dtype=dtype)
        return layer, inputs, backward(layer(inputs))

    return run


def backward(output: Any) -> Any:
    """Take the gradients of everything that has one; returns ``output``."""
    outputs = output if isinstance(output, (tuple, list)) else [output]
    found = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
    if found:
        torch.autograd.backward(
            [one.real.sum() if one.is_complex() else one.sum() for one in found]
        )
    return output


def of(call: Callable[..., Any], *make: Callable[[], Tensor]) -> Any:
    """Return a program that calls ``call`` with inputs that are made first."""

    def run() -> Any:
        inputs = [one() for one in make]
        return inputs, backward(call(*inputs))

    return run


def attention(dtype: torch.dtype, size: int, **settings: Any) -> Any:
    """Return a program of scaled_dot_product_attention with heads of ``size``."""

    def run() -> Any:
        q, k, v = (x(4, 8, 256, size, dtype=dtype) for _ in range(3))
        given = {**settings}
        if given.pop("mask", False):
            given["attn_mask"] = torch.zeros(256, 256, device="cuda", dtype=dtype)
        return q, k, v, backward(F.scaled_dot_product_attention(q, k, v, **given))

    return run


def recurrent(kind: str, **settings: Any) -> Any:
    """Return a program that trains a recurrent layer once."""

    def run() -> Any:
        layer = getattr(nn, kind)(128, 256, **settings).cuda()
        inputs = x(32, 16, 128)
        output, state = layer(inputs)
        return layer, inputs, backward(output), state

    return run


PRODUCTS: dict[str, Any] = {
    "mm": of(torch.mm, lambda: x(512, 256), lambda: x(256, 384)),
    "mm bfloat16": of(torch.mm, lambda: x(512, 256, dtype=BF16), lambda: x(256, 384, dtype=BF16)),
    "mv": of(torch.mv, lambda: x(512, 256), lambda: x(256)),
    "dot": of(torch.dot, lambda: x(100_000), lambda: x(100_000)),
    "bmm": of(torch.bmm, lambda: x(16, 128, 64), lambda: x(16, 64, 128)),
    "matmul broadcast": of(torch.matmul, lambda: x(8, 1, 64, 64), lambda: x(4, 64, 64)),
    "einsum": of(
        lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b),
        lambda: x(4, 8, 128, 32),
        lambda: x(4, 8, 128, 32),
    ),
    "addmm": of(torch.addmm, lambda: x(384), lambda: x(512, 256), lambda: x(256, 384)),
    "baddbmm": of(torch.baddbmm, lambda: x(8, 64, 64), lambda: x(8, 64, 32), lambda: x(8, 32, 64)),
    "linear": module(lambda: nn.Linear(512, 384), 64, 512),
    "linear without bias": module(lambda: nn.Linear(512, 384, bias=False), 64, 512),
    "linear one row": module(lambda: nn.Linear(512, 384), 1, 512),
    "linear three dimensions": module(lambda: nn.Linear(512, 384), 8, 16, 512),
    "linear float16": module(lambda: nn.Linear(512, 384), 64, 512, dtype=F16),
    "linear bfloat16": module(lambda: nn.Linear(512, 384), 64, 512, dtype=BF16),
    "bilinear": of(
        F.bilinear, lambda: x(32, 64), lambda: x(32, 48), lambda: x(16, 64, 48), lambda: x(16)
    ),
}

CONVOLUTIONS: dict[str, Any] = {
    "1d": module(lambda: nn.Conv1d(64, 128, 5, padding=2), 8, 64, 1000),
    "2d 3x3": module(lambda: nn.Conv2d(64, 128, 3, padding=1), 8, 64, 56, 56),
    "2d 1x1": module(lambda: nn.Conv2d(64, 256, 1, bias=False), 8, 64, 56, 56),
    "2d stride": module(lambda: nn.Conv2d(3, 64, 7, 2, 3), 8, 3, 224, 224),
    "2d bfloat16": module(lambda: nn.Conv2d(64, 128, 3, padding=1), 8, 64, 56, 56, dtype=BF16),
    "2d depthwise": module(lambda: nn.Conv2d(96, 96, 7, padding=3, groups=96), 8, 96, 56, 56),
    "2d groups": module(lambda: nn.Conv2d(64, 64, 3, groups=4), 8, 64, 28, 28),
    "2d dilated": module(lambda: nn.Conv2d(64, 64, 3, dilation=2), 8, 64, 28, 28),
    "2d transposed": module(lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), 8, 64, 28, 28),
    "2d channels last": of(
        lambda a, w: F.conv2d(a, w, padding=1),
        lambda: x(8, 64, 56, 56, grad=False).to(memory_format=torch.channels_last),
        lambda: x(64, 64, 3, 3),
    ),
    "3d": module(lambda: nn.Conv3d(16, 32, 3, padding=1), 2, 16, 16, 28, 28),
}

ACTIVATIONS: dict[str, Any] = {
    name: module(getattr(nn, name), 64, 1000)
    for name in (
        *("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "SELU", "LeakyReLU", "PReLU", "Mish"),
        *("Softplus", "Hardswish", "Hardsigmoid", "LogSigmoid", "Softsign", "CELU", "GLU"),
    )
} | {
    "ReLU in place": of(lambda a: F.relu(a * 2, inplace=True), lambda: x(64, 1000)),
    "softmax": of(lambda a: a.softmax(-1), lambda: x(64, 1000)),
    "softmax bfloat16": of(lambda a: a.softmax(-1), lambda: x(64, 1000, dtype=BF16)),
    "log_softmax": of(lambda a: a.log_softmax(-1), lambda: x(64, 50_000)),
    "dropout": of(lambda a: F.dropout(a, 0.1), lambda: x(64, 1000)),
    "gumbel_softmax": of(F.gumbel_softmax, lambda: x(64, 1000)),
}

NORMS: dict[str, Any] = {
    "batch 1d": module(lambda: nn.BatchNorm1d(256), 64, 256),
    "batch 2d": module(lambda: nn.BatchNorm2d(64), 8, 64, 56, 56),
    "batch 2d bfloat16": module(lambda: nn.BatchNorm2d(64), 8, 64, 56, 56, dtype=BF16),
    "batch 2d inference": module(lambda: nn.BatchNorm2d(64).eval(), 8, 64, 56, 56),
    "layer": module(lambda: nn.LayerNorm(768), 8, 128, 768),
    "layer bfloat16": module(lambda: nn.LayerNorm(768), 8, 128, 768, dtype=BF16),
    "rms": module(lambda: nn.RMSNorm(768), 8, 128, 768),
    "group": module(lambda: nn.GroupNorm(8, 64), 8, 64, 28, 28),
    "instance": module(lambda: nn.InstanceNorm2d(64, affine=True), 8, 64, 28, 28),
    "local response": module(lambda: nn.LocalResponseNorm(5), 8, 64, 28, 28),
    "weight": of(
        lambda a: nn.utils.parametrizations.weight_norm(nn.Linear(256, 256).cuda())(a),
        lambda: x(32, 256),
    ),
}

LOSSES: dict[str, Any] = {
    "cross_entropy": of(F.cross_entropy, lambda: x(64, 1000), lambda: index(1000, 64)),
    "cross_entropy large": of(
        F.cross_entropy, lambda: x(1024, 50_257), lambda: index(50_257, 1024)
    ),
    "cross_entropy bfloat16": of(
        F.cross_entropy, lambda: x(512, 32_000, dtype=BF16), lambda: index(32_000, 512)
    ),
    "cross_entropy smoothed": of(
        lambda a, b: F.cross_entropy(a, b, label_smoothing=0.1),
        lambda: x(64, 1000),
        lambda: index(1000, 64),
    ),
    "cross_entropy 2d": of(F.cross_entropy, lambda: x(4, 21, 64, 64), lambda: index(21, 4, 64, 64)),
    "nll_loss": of(F.nll_loss, lambda: x(64, 1000), lambda: index(1000, 64)),
    "mse_loss": of(F.mse_loss, lambda: x(64, 1000), lambda: x(64, 1000, grad=False)),
    "l1_loss": of(F.l1_loss, lambda: x(64, 1000), lambda: x(64, 1000, grad=False)),
    "smooth_l1_loss": of(F.smooth_l1_loss, lambda: x(64, 1000), lambda: x(64, 1000, grad=False)),
    "huber_loss": of(F.huber_loss, lambda: x(64, 1000), lambda: x(64, 1000, grad=False)),
    "binary_cross_entropy": of(
        F.binary_cross_entropy,
        lambda: positive(64, 1000),
        lambda: torch.ones(64, 1000, device="cuda"),
    ),
    "binary_cross_entropy_with_logits": of(
        F.binary_cross_entropy_with_logits,
        lambda: x(64, 1000),
        lambda: torch.ones(64, 1000, device="cuda"),
    ),
    "kl_div": of(
        lambda a, b: F.kl_div(a, b, reduction="batchmean"),
        lambda: x(64, 1000),
        lambda: positive(64, 1000).detach(),
    ),
    "cosine_embedding_loss": of(
        F.cosine_embedding_loss,
        lambda: x(64, 100),
        lambda: x(64, 100),
        lambda: torch.ones(64, device="cuda"),
    ),
    "triplet_margin_loss": of(
        F.triplet_margin_loss, lambda: x(64, 100), lambda: x(64, 100), lambda: x(64, 100)
    ),
    "ctc_loss": of(
        lambda a, b: F.ctc_loss(a.log_softmax(-1), b, torch.full((16,), 50), torch.full((16,), 20)),
        lambda: x(50, 16, 30),
        lambda: torch.randint(1, 30, (16, 20), device="cuda"),
    ),
}

REDUCTIONS: dict[str, Any] = {
    "sum": of(torch.sum, lambda: x(1000, 1000)),
    "sum of rows": of(lambda a: a.sum(1), lambda: x(1000, 1000)),
    "sum of columns": of(lambda a: a.sum(0), lambda: x(10_000, 100)),
    "sum bfloat16": of(torch.sum, lambda: x(1000, 1000, dtype=BF16)),
    "mean": of(torch.mean, lambda: x(4096, 4096)),
    "var": of(lambda a: a.var(-1), lambda: x(1000, 1000)),
    "std": of(torch.std, lambda: x(1000, 1000)),
    "norm": of(torch.linalg.vector_norm, lambda: x(1000, 1000)),
    "max": of(torch.max, lambda: x(1000, 1000)),
    "max of rows": of(lambda a: a.max(-1).values, lambda: x(1000, 1000)),
    "amax": of(lambda a: a.amax(0), lambda: x(1000, 1000)),
    "argmax": of(lambda a: a.argmax(-1), lambda: x(1000, 1000)),
    "logsumexp": of(lambda a: a.logsumexp(-1), lambda: x(1000, 1000)),
    "prod": of(lambda a: a.prod(-1), lambda: x(100, 100)),
    "all": of(torch.all, lambda: x(1000, 1000, grad=False) > 0),
    "count of integers": of(torch.sum, lambda: index(2, 1000, 1000)),
    "cumsum": of(lambda a: a.cumsum(-1), lambda: x(100, 10_000)),
    "cumsum of one dimension": of(lambda a: a.cumsum(0), lambda: x(1_000_000)),
    "cumprod": of(lambda a: a.cumprod(-1), lambda: x(100, 100)),
    "logcumsumexp": of(lambda a: a.logcumsumexp(-1), lambda: x(100, 100)),
}

SORTING: dict[str, Any] = {
    "sort small rows": of(lambda a: a.sort(-1).values, lambda: x(100, 1000)),
    "sort one dimension": of(lambda a: a.sort().values, lambda: x(1_000_000)),
    "sort large rows": of(lambda a: a.sort(-1).values, lambda: x(16, 100_000)),
    "argsort": of(torch.argsort, lambda: x(100, 5000)),
    "topk": of(lambda a: a.topk(50, -1).values, lambda: x(64, 50_257)),
    "topk small": of(lambda a: a.topk(5, -1).values, lambda: x(64, 100)),
    "median": of(lambda a: a.median(-1).values, lambda: x(100, 1000)),
    "kthvalue": of(lambda a: a.kthvalue(3, -1).values, lambda: x(100, 1000)),
    "randperm": lambda: torch.randperm(100_000, device="cuda"),
    "randperm small": lambda: torch.randperm(1000, device="cuda"),
    "multinomial": lambda: torch.multinomial(torch.rand(64, 1000, device="cuda"), 5),
    "searchsorted": lambda: torch.searchsorted(
        torch.arange(1000.0, device="cuda"), torch.rand(5000, device="cuda")
    ),
    "histc": of(torch.histc, lambda: x(100_000, grad=False)),
}

INDEXING: dict[str, Any] = {
    "embedding": of(F.embedding, lambda: index(30_000, 32, 128), lambda: x(30_000, 256)),
    "embedding few": of(F.embedding, lambda: index(1000, 4, 8), lambda: x(1000, 64)),
    "embedding_bag": of(
        lambda i, w: F.embedding_bag(i, w, mode="mean"),
        lambda: index(10_000, 64, 32),
        lambda: x(10_000, 64),
    ),
    "index_select": of(
        lambda a, i: a.index_select(0, i), lambda: x(1000, 64), lambda: index(1000, 5000)
    ),
    "getitem": of(lambda a, i: a[i], lambda: x(1000, 64), lambda: index(1000, 5000)),
    "getitem two": of(
        lambda a, i, j: a[i, j],
        lambda: x(1000, 64),
        lambda: index(1000, 500),
        lambda: index(64, 500),
    ),
    "gather": of(lambda a, i: a.gather(1, i), lambda: x(100, 100), lambda: index(100, 100, 50)),
    "scatter_add": of(
        lambda a, i: torch.zeros(100, 100, device="cuda").scatter_add(1, i, a),
        lambda: x(100, 100),
        lambda: index(100, 100, 100),
    ),
    "index_add": of(
        lambda a, i: torch.zeros(100, 64, device="cuda").index_add(0, i, a),
        lambda: x(5000, 64),
        lambda: index(100, 5000),
    ),
    "index_put accumulating": of(
        lambda a, i: torch.zeros(100, 64, device="cuda").index_put((i,), a, accumulate=True),
        lambda: x(5000, 64),
        lambda: index(100, 5000),
    ),
    "masked_fill": of(
        lambda a: a.masked_fill(torch.ones(100, 100, dtype=torch.bool, device="cuda").triu(1), 0.0),
        lambda: x(8, 100, 100),
    ),
    "where": of(lambda a, b: torch.where(a > 0, a, b), lambda: x(100, 1000), lambda: x(1000)),
    "take_along_dim": of(lambda a: torch.take_along_dim(a, a.argsort(-1), -1), lambda: x(100, 100)),
    "one_hot": of(lambda i: F.one_hot(i, 100), lambda: index(100, 1000)),
}

LAYOUT: dict[str, Any] = {
    "cat": of(lambda a, b: torch.cat([a, b], 1), lambda: x(100, 50), lambda: x(100, 70)),
    "stack": of(lambda a, b: torch.stack([a, b]), lambda: x(100, 50), lambda: x(100, 50)),
    "split": of(lambda a: [part * 2 for part in a.split(30, 1)], lambda: x(100, 90)),
    "pad": of(lambda a: F.pad(a, (1, 2, 3, 4)), lambda: x(8, 16, 28, 28)),
    "pad reflect": of(lambda a: F.pad(a, (3, 3, 3, 3), mode="reflect"), lambda: x(8, 16, 28, 28)),
    "roll": of(lambda a: a.roll(3, 1), lambda: x(100, 100)),
    "flip": of(lambda a: a.flip(1), lambda: x(100, 100)),
    "repeat_interleave": of(lambda a: a.repeat_interleave(3, 1), lambda: x(100, 100)),
    "transpose and reshape": of(lambda a: a.transpose(1, 2).reshape(8, -1), lambda: x(8, 64, 100)),
    "broadcast": of(lambda a, b: a * b + a, lambda: x(8, 1, 100), lambda: x(64, 1)),
    "to half and back": of(lambda a: a.half().float(), lambda: x(100, 1000)),
    "add in place": of(lambda a: (a * 1).add_(1.0).mul_(2.0), lambda: x(100, 1000)),
    "complex": of(lambda a: torch.view_as_complex(a) * 2j, lambda: x(100, 100, 2)),
    "unfold": of(lambda a: F.unfold(a, 3, padding=1), lambda: x(4, 16, 28, 28)),
    "fft": of(torch.fft.fft, lambda: x(64, 1000)),
    "rfft2": of(torch.fft.rfft2, lambda: x(8, 64, 64)),
}

SPATIAL: dict[str, Any] = {
    "max_pool2d": of(lambda a: F.max_pool2d(a, 3, 2, 1), lambda: x(8, 64, 56, 56)),
    "avg_pool2d": of(lambda a: F.avg_pool2d(a, 2), lambda: x(8, 64, 56, 56)),
    "adaptive_avg_pool2d": of(lambda a: F.adaptive_avg_pool2d(a, 7), lambda: x(8, 64, 56, 56)),
    "adaptive_max_pool2d": of(lambda a: F.adaptive_max_pool2d(a, 7), lambda: x(8, 64, 56, 56)),
    "interpolate nearest": of(lambda a: F.interpolate(a, scale_factor=2), lambda: x(4, 16, 28, 28)),
    "interpolate bilinear": of(
        lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), lambda: x(4, 16, 28, 28)
    ),
    "grid_sample": of(
        lambda a, g: F.grid_sample(a, g, align_corners=False),
        lambda: x(4, 16, 28, 28),
        lambda: x(4, 28, 28, 2),
    ),
    "pixel_shuffle": of(lambda a: F.pixel_shuffle(a, 2), lambda: x(4, 16, 28, 28)),
}

ATTENTION: dict[str, Any] = {
    "flash": attention(BF16, 64),
    "flash causal": attention(BF16, 64, is_causal=True),
    "flash dropout": attention(F16, 64, dropout_p=0.1),
    "flash odd heads": attention(BF16, 72),
    "large heads": attention(BF16, 256),
    "masked": attention(BF16, 64, mask=True),
    "float32": attention(F32, 64),
    "float32 causal": attention(F32, 64, is_causal=True),
    "float32 masked": attention(F32, 64, mask=True),
    "float64": attention(torch.float64, 64),
}

RECURRENT: dict[str, Any] = {
    "RNN": recurrent("RNN"),
    "LSTM": recurrent("LSTM"),
    "LSTM two layers": recurrent("LSTM", num_layers=2, batch_first=True),
    "LSTM dropout": recurrent("LSTM", num_layers=2, dropout=0.1),
    "LSTM both ways": recurrent("LSTM", bidirectional=True),
    "LSTM projected": recurrent("LSTM", proj_size=64),
    "GRU": recurrent("GRU"),
}

LIBRARIES: dict[str, Any] = {
    "inv": of(torch.linalg.inv, lambda: torch.eye(64, device="cuda").requires_grad_()),
    "solve": of(
        torch.linalg.solve,
        lambda: torch.eye(64, device="cuda").requires_grad_(),
        lambda: x(64, 8),
    ),
    "cholesky": of(torch.linalg.cholesky, lambda: torch.eye(64, device="cuda").requires_grad_()),
    "qr": of(torch.linalg.qr, lambda: x(64, 64)),
    "svd": of(lambda a: torch.linalg.svdvals(a), lambda: x(64, 32)),
    "eigh": of(torch.linalg.eigvalsh, lambda: torch.eye(64, device="cuda").requires_grad_()),
    "det": of(torch.linalg.det, lambda: torch.eye(64, device="cuda").requires_grad_()),
}

FAMILIES = {
    "products": PRODUCTS,
    "convolutions": CONVOLUTIONS,
    "activations": ACTIVATIONS,
    "norms": NORMS,
    "losses": LOSSES,
    "reductions": REDUCTIONS,
    "sorting": SORTING,
    "indexing": INDEXING,
    "layout": LAYOUT,
    "spatial": SPATIAL,
    "attention": ATTENTION,
    "recurrent": RECURRENT,
    "libraries": LIBRARIES,
}


def scenarios() -> Iterator[Scenario]:
    """Yield every operator of every family."""
    for family, programs in FAMILIES.items():
        for name, run in programs.items():
            yield Scenario(f"{family}/{name}", run, __name__)
