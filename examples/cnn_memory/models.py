"""The models, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn


def alexnet() -> nn.Sequential:
    """Return AlexNet for images of (3, 224, 224), without dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Flatten(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    )


def alexnet_and_images() -> tuple[nn.Module, Tensor]:
    """Return AlexNet and one image, for ``gpumem predict --by layer``."""
    return alexnet().cuda(), torch.randn(1, 3, 224, 224, device="cuda")


def train_alexnet(batch: int = 128) -> None:
    """Train AlexNet for two steps with Adam."""
    model = alexnet().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    for _ in range(2):
        model(images).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def convolution() -> nn.Sequential:
    """Return a convolution from 64 to 128 channels."""
    return nn.Sequential(nn.Conv2d(64, 128, 3, padding=1, bias=False))


def separable_convolution() -> nn.Sequential:
    """Return a convolution of each channel, followed by one across channels."""
    return nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False),
        nn.Conv2d(64, 128, 1, bias=False),
    )


def blocks(count: int, *, inplace: bool = False) -> nn.Sequential:
    """Return ``count`` blocks of a convolution with 16 channels and ReLU."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.ReLU(inplace))
            for _ in range(count)
        )
    )


@dataclass(frozen=True)
class Size:
    """Bytes of a model and of its activations, without the allocator's rounding."""

    parameters: int
    outputs: int
    """Outputs of all layers: the intermediates of the forward pass."""

    @property
    def outputs_and_gradients(self) -> int:
        """Bytes with backward, where every intermediate has a gradient of the same size."""
        return 2 * self.outputs


def size_of(model: nn.Module, *shape: int) -> Size:
    """Return the sizes of ``model`` for an input of ``shape``; nothing is allocated for it."""
    outputs = 0

    def count(module: nn.Module, inputs: object, output: Tensor) -> None:
        nonlocal outputs
        outputs += bytes_of(*output.shape, dtype=output.dtype)

    model = model.to("meta")
    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(count) for leaf in leaves]
    with torch.no_grad():
        model(torch.empty(shape, device="meta"))
    for hook in hooks:
        hook.remove()
    return Size(sum(bytes_of(*p.shape, dtype=p.dtype) for p in model.parameters()), outputs)


def bytes_of(*shape: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of the elements of a tensor."""
    return prod(shape) * dtype.itemsize
