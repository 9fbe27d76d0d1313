"""Models in plain torch: vision, recurrent, diffusion, low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from producers import vision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.simulated.models.accounting import (
    BLOCK,
    Inputs,
    account_for_training,
    assert_holds,
    blocks,
    on_gpu,
)

SHRUNK: dict[str, Callable[[], nn.Module]] = {
    "ResNet": lambda: vision.ResNet((1, 1, 1, 1), classes=10),
    "VGG": lambda: vision.vgg16(10),
    "MobileNet": lambda: vision.mobilenet_v2(10),
    "ConvNeXt": lambda: vision.convnext_tiny(10),
}


class Classified(nn.Module):
    """A classifier that takes its images by name."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(images), labels)


def images(batch: int = 2, size: int = 32) -> Inputs:
    return {
        "images": torch.ones(batch, 3, size, size),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


def loss(model: nn.Module, inputs: Inputs) -> Tensor:
    result: Tensor = model(**inputs)
    return result


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("make", SHRUNK.values(), ids=SHRUNK)
def test_classifiers_of_images(make: Callable[[], nn.Module], autocast: bool) -> None:
    account_for_training(lambda: Classified(make()), images, loss, autocast=autocast)


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "mobilenet_v2", "convnext_tiny"])
def test_classifiers_have_the_parameters_of_torchvision(name: str) -> None:
    with on_gpu() as gpu, torch.device("cuda"):
        model = vision.MODELS[name]()
        elements = sum(parameter.numel() for parameter in model.parameters())
        assert elements == vision.PARAMETERS[name]
        assert_holds(gpu, blocks([*model.parameters(), *model.buffers()]))


class LanguageModel(nn.Module):
    """An LSTM of two layers over tokens; embedding and output share a weight."""

    def __init__(self, words: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, words)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def test_recurrent_language_model() -> None:
    """cuDNN's dropout has 48 bytes for each of 1,024 threads of 108 multiprocessors."""
    account_for_training(
        LanguageModel,
        lambda: {"tokens": torch.zeros(4, 16, dtype=torch.long)},
        loss,
        kept=48 * 1024 * 108,
    )


class Denoiser(nn.Module):
    """A U-Net that predicts the noise in an image, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = vision.UNet(channels=32)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        return F.mse_loss(self.net(images + noise, time), noise)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_diffusion(autocast: bool) -> None:
    account_for_training(
        Denoiser,
        lambda: {"images": torch.ones(2, 3, 32, 32), "time": torch.ones(2, 32)},
        loss,
        autocast=autocast,
    )


class Adapted(nn.Module):
    """A frozen linear layer beside a trained product of two narrow ones."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.up(self.down(x))
        return result


class Stack(nn.Module):
    """Linear layers and activations, each kept or recomputed."""

    def __init__(self, layers: int, width: int, rank: int = 0, recomputed: bool = False) -> None:
        super().__init__()
        linear = [nn.Linear(width, width) for _ in range(layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(Adapted(layer, rank) if rank else layer, nn.GELU()) for layer in linear
        )
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return x.sum()


def rows() -> Inputs:
    return {"x": torch.ones(2048, 256)}


def test_low_rank_adapters_have_all_gradients_and_state() -> None:
    account_for_training(lambda: Stack(4, 256, rank=8), rows, loss)


def test_recomputed_activations_are_not_kept() -> None:
    kept, _ = account_for_training(lambda: Stack(8, 256), rows, loss)
    recomputed, _ = account_for_training(lambda: Stack(8, 256, recomputed=True), rows, loss)
    # Kept: 16 results of layers and activations when the sum is taken, with its own result, partial
    # results and semaphores. Recomputed: eight results of pairs, and within the last pair one more.
    activation = 2048 * 256 * 4
    assert kept - recomputed == 16 * activation + 3 * BLOCK - 9 * activation
