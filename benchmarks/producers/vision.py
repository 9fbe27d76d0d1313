"""Image models in plain torch, layer for layer those of torchvision, and a small U-Net.

Shapes, order of parameters and order of operators are those of torchvision's models of the same
name, so that their memory is the same; weights are torch's own initial ones. ``PARAMETERS`` says
how many elements each has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "mobilenet_v2": 3_504_872,
    "convnext_tiny": 28_589_128,
}
"""Elements of the parameters of each model with a thousand classes, as torchvision documents."""


# Residual networks.


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * 4
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """A residual network of bottlenecks; ``blocks`` per stage."""

    def __init__(self, blocks: tuple[int, int, int, int], classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = 64
        stages = []
        for at, count in enumerate(blocks):
            width = 64 * 2**at
            layers = [Bottleneck(inputs, width, 1 if at == 0 else 2)]
            inputs = width * 4
            layers += [Bottleneck(inputs, width, 1) for _ in range(count - 1)]
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the classes."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.avgpool(x), 1)
        scores: Tensor = self.fc(x)
        return scores


def resnet50(classes: int = 1000) -> ResNet:
    """ResNet-50."""
    return ResNet((3, 4, 6, 3), classes)


def resnet101(classes: int = 1000) -> ResNet:
    """ResNet-101."""
    return ResNet((3, 4, 23, 3), classes)


# VGG.

_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of each convolution; 0 is a pool."""


class VGG(nn.Module):
    """VGG of configuration D, without batch norm."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for channels in _VGG16:
            if not channels:
                layers.append(nn.MaxPool2d(2, 2))
                continue
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = channels
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(True),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the classes."""
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        scores: Tensor = self.classifier(x)
        return scores


def vgg16(classes: int = 1000) -> VGG:
    """VGG-16."""
    return VGG(classes)


# MobileNetV2.


class _ConvNormActivation(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, groups: int) -> None:
        super().__init__(
            nn.Conv2d(
                inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False
            ),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    """Widen, filter each channel on its own, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int) -> None:
        super().__init__()
        hidden = inputs * widening
        self.shortcut = stride == 1 and inputs == outputs
        layers: list[nn.Module] = []
        if widening != 1:
            layers.append(_ConvNormActivation(inputs, hidden, 1, 1, 1))
        layers += [
            _ConvNormActivation(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        result: Tensor = x + self.conv(x) if self.shortcut else self.conv(x)
        return result


_MOBILENET_V2 = (
    # widening, channels, blocks, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(nn.Module):
    """MobileNetV2 of width 1."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_ConvNormActivation(3, 32, 3, 2, 1)]
        inputs = 32
        for widening, channels, blocks, stride in _MOBILENET_V2:
            for at in range(blocks):
                layers.append(InvertedResidual(inputs, channels, 1 if at else stride, widening))
                inputs = channels
        layers.append(_ConvNormActivation(inputs, 1280, 1, 1, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the classes."""
        x = functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        scores: Tensor = self.classifier(torch.flatten(x, 1))
        return scores


def mobilenet_v2(classes: int = 1000) -> MobileNetV2:
    """MobileNetV2."""
    return MobileNetV2(classes)


# ConvNeXt.


class _LayerNorm2d(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        x = input.permute(0, 2, 3, 1)
        x = functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class _Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class ConvNeXtBlock(nn.Module):
    """A depthwise 7x7 convolution and a perceptron over channels, scaled and dropped by depth."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width, bias=True),
            _Permute(0, 2, 3, 1),
            norm(width),
            nn.Linear(width, 4 * width, bias=True),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=True),
            _Permute(0, 3, 1, 2),
        )
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1) * 1e-6)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        result: Tensor = self.layer_scale * self.block(x)
        if self.training and self.drop:
            # torchvision's stochastic depth, by row.
            shape = [result.shape[0]] + [1] * (result.ndim - 1)
            noise = torch.empty(shape, dtype=x.dtype, device=x.device)
            noise = noise.bernoulli_(1 - self.drop)
            noise.div_(1 - self.drop)
            result = result * noise
        result += x
        return result


class ConvNeXt(nn.Module):
    """ConvNeXt of four stages; ``blocks`` and ``widths`` of each."""

    def __init__(
        self,
        blocks: tuple[int, ...] = (3, 3, 9, 3),
        widths: tuple[int, ...] = (96, 192, 384, 768),
        classes: int = 1000,
        drop: float = 0.1,
    ) -> None:
        super().__init__()
        norm = partial(_LayerNorm2d, eps=1e-6)
        layers: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, widths[0], 4, 4, bias=True), norm(widths[0]))
        ]
        total, at = sum(blocks), 0
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            stages: list[nn.Module] = []
            for _ in range(count):
                stages.append(ConvNeXtBlock(width, drop * at / (total - 1)))
                at += 1
            layers.append(nn.Sequential(*stages))
            if stage + 1 < len(widths):
                layers.append(nn.Sequential(norm(width), nn.Conv2d(width, widths[stage + 1], 2, 2)))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            norm(widths[-1]), nn.Flatten(1), nn.Linear(widths[-1], classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the classes."""
        scores: Tensor = self.classifier(self.avgpool(self.features(x)))
        return scores


def convnext_tiny(classes: int = 1000) -> ConvNeXt:
    """ConvNeXt-T."""
    return ConvNeXt(classes=classes)


# A small U-Net of a diffusion model.


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(32, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        result: Tensor = self.shortcut(x) + hidden
        return result


class _Attention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, self.heads, channels // self.heads, -1)
        query, key, value = qkv.transpose(-1, -2).unbind(1)
        attended = functional.scaled_dot_product_attention(query, key, value)
        attended = attended.transpose(-1, -2).reshape(batch, channels, height, width)
        result: Tensor = x + self.out(attended)
        return result


class UNet(nn.Module):
    """A denoiser: residual blocks and attention down to the lowest resolution and back."""

    def __init__(
        self, channels: int = 64, factors: tuple[int, ...] = (1, 2, 4), image: int = 3
    ) -> None:
        super().__init__()
        embedding = channels * 4
        self.channels = channels
        self.time = nn.Sequential(
            nn.Linear(channels, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.first = nn.Conv2d(image, channels, 3, padding=1)
        widths = [channels * factor for factor in factors]
        self.down = nn.ModuleList()
        self.shrink = nn.ModuleList()
        inputs = channels
        for width in widths:
            self.down.append(_Residual(inputs, width, embedding))
            self.shrink.append(nn.Conv2d(width, width, 3, 2, 1))
            inputs = width
        self.middle = _Residual(inputs, inputs, embedding)
        self.attention = _Attention(inputs, 4)
        self.grow = nn.ModuleList()
        self.up = nn.ModuleList()
        for width in reversed(widths):
            self.grow.append(nn.ConvTranspose2d(inputs, width, 4, 2, 1))
            self.up.append(_Residual(2 * width, width, embedding))
            inputs = width
        self.norm = nn.GroupNorm(32, inputs)
        self.last = nn.Conv2d(inputs, image, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise in ``x`` (batch, image, height, width) at ``time`` (batch, channels)."""
        time = self.time(time)
        x = self.first(x)
        skipped = []
        for down, shrink in zip(self.down, self.shrink, strict=True):
            x = down(x, time)
            skipped.append(x)
            x = shrink(x)
        x = self.attention(self.middle(x, time))
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), skipped.pop()], 1), time)
        noise: Tensor = self.last(functional.silu(self.norm(x)))
        return noise


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet50,
    "resnet101": resnet101,
    "vgg16": vgg16,
    "mobilenet_v2": mobilenet_v2,
    "convnext_tiny": convnext_tiny,
}
"""Classifiers of images by torchvision's names."""
