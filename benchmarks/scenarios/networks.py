"""Networks in plain torch: training and inference, autocast, checkpointing, sizes and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from producers import einsum_transformer, language_model, naive_attention, vision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from training_step import Gpt2

from scenarios import Scenario

Loss = Callable[[nn.Module], Tensor]


def trained(
    make: Callable[[], nn.Module],
    loss: Loss,
    *,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
) -> Any:
    """Return a program that does two steps with AdamW."""

    def run() -> Any:
        model: Any = make().to("cuda", dtype).train()
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with torch.autocast("cuda", dtype=autocast) if autocast else nullcontext():
                value = loss(model)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    return run


def used(make: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Any:
    """Return a program that makes one forward pass without gradients."""

    def run() -> Any:
        model = make().cuda().eval()
        with torch.inference_mode():
            return model, model(inputs())

    return run


def images(batch: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(batch, 3, size, size)."""
    return torch.randn(batch, 3, size, size, device="cuda", dtype=dtype)


def classified(batch: int, size: int, dtype: torch.dtype = torch.float32) -> Loss:
    """The loss of a classifier of images."""

    def loss(model: nn.Module) -> Tensor:
        labels = torch.zeros(batch, dtype=torch.long, device="cuda")
        return F.cross_entropy(model(images(batch, size, dtype)), labels)

    return loss


def denoised(model: nn.Module) -> Tensor:
    """The loss of a network that finds noise."""
    noise = torch.randn(4, 3, 64, 64, device="cuda")
    return F.mse_loss(model(noise, torch.ones(4, 32, device="cuda")), noise)


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with activations between them."""
    pairs = pairwise(widths)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> Loss:
    """The mean of what a network makes of rows of ones."""
    return lambda model: model(torch.ones(count, width, device="cuda", dtype=dtype)).mean()


def words(batch: int, length: int, vocabulary: int) -> Loss:
    """The loss of a language model on random tokens."""

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.randint(vocabulary, (batch, length), device="cuda")
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return loss


class Recurrent(nn.Module):
    """Words through an LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.lstm = nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 5000)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> scores of the next words."""
        hidden, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.head(hidden)
        return scores


class Recomputed(nn.Module):
    """Layers whose activations are made again in backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
                for _ in range(8)
            ]
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 512) -> the same."""
        x = x.requires_grad_()
        if self.how == "sequential":
            done: Tensor = checkpoint_sequential(self.blocks, 4, x, use_reentrant=False)
            return done
        for block in self.blocks:
            reentrant = self.how == "reentrant"
            x = checkpoint(block, x, use_reentrant=reentrant) if self.how else block(x)
        return x


def transformer(layers: int, width: int, **settings: Any) -> nn.Module:
    """torch's own encoder."""
    layer = nn.TransformerEncoderLayer(width, 8, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def sequences(model: nn.Module) -> Tensor:
    """The mean of what an encoder makes of ones."""
    return torch.as_tensor(model(torch.ones(8, 128, 512, device="cuda")).mean())


def unnoticed() -> None:
    """Recording has begun long before."""


VISION: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": vision.resnet50,
    "VGG-16": vision.vgg16,
    "MobileNetV2": vision.mobilenet_v2,
    "ConvNeXt-T": vision.convnext_tiny,
}

BF16, F16 = torch.bfloat16, torch.float16


def programs() -> Iterator[tuple[str, Any]]:
    """Yield names and programs."""
    for name, make in VISION.items():
        yield f"vision/{name}", trained(make, classified(4, 224))
        yield f"vision/{name} autocast", trained(make, classified(4, 224), autocast=BF16)
        yield f"vision/{name} inference", used(make, partial(images, 4, 224))
    for batch in (1, 7, 32):
        yield f"vision/ResNet-50 batch {batch}", trained(vision.resnet50, classified(batch, 160))
    yield (
        "vision/ResNet-50 channels last",
        trained(vision.resnet50, classified(4, 224), autocast=F16, channels_last=True),
    )
    yield (
        "vision/ResNet-50 bfloat16",
        trained(vision.resnet50, classified(4, 224, BF16), dtype=BF16),
    )
    yield "vision/U-Net", trained(partial(vision.UNet, channels=32), denoised)
    yield (
        "vision/U-Net autocast",
        trained(partial(vision.UNet, channels=32), denoised, autocast=F16),
    )

    for count, widths in ((1, (10, 20, 1)), (100, (256, 250)), (4096, (1000, 4000, 4000, 10))):
        name = f"perceptron/{'-'.join(map(str, widths))} x {count}"
        make = partial(perceptron, *widths)
        yield name, trained(make, rows(count, widths[0]))
        yield f"{name} bfloat16", trained(make, rows(count, widths[0], BF16), dtype=BF16)
        yield f"{name} autocast", trained(make, rows(count, widths[0]), autocast=F16)

    for how in ("", "reentrant", "not reentrant", "sequential"):
        make = partial(Recomputed, how)
        yield f"checkpointing/{how or 'none'}", trained(make, rows(2048, 512))
        yield (
            f"checkpointing/{how or 'none'} autocast",
            trained(make, rows(2048, 512), autocast=BF16),
        )

    yield "language/LSTM", trained(Recurrent, words(8, 64, 5000))
    yield "language/LSTM autocast", trained(Recurrent, words(8, 64, 5000), autocast=F16)
    for batch, length in ((1, 128), (4, 512), (3, 333)):
        loss = words(batch, length, 50_257)
        yield f"language/GPT-2 {batch}x{length}", trained(partial(Gpt2, 4), loss)
    loss = words(4, 512, 50_257)
    yield "language/GPT-2 4x512 autocast", trained(partial(Gpt2, 4), loss, autocast=BF16)
    yield "language/GPT-2 4x512 bfloat16", trained(partial(Gpt2, 4), loss, dtype=BF16)
    yield "language/encoder", trained(partial(transformer, 4, 512), sequences)
    yield (
        "language/encoder autocast",
        trained(partial(transformer, 4, 512, norm_first=True), sequences, autocast=BF16),
    )
    yield "language/naive attention", naive_attention.step
    yield "language/einsum forward", partial(einsum_transformer.forward, 100)
    yield "language/einsum autocast", partial(einsum_transformer.forward, 100, autocast=True)
    yield "language/einsum training", partial(einsum_transformer.training, 100)
    yield "language/own layers", partial(language_model.step, "small", True, unnoticed)
    yield "language/own layers and Adam", partial(language_model.training, "small", unnoticed)


def scenarios() -> Iterator[Scenario]:
    """Yield every program."""
    for name, run in programs():
        yield Scenario(name, run, __name__)
