"""Operations beside memory, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from examples.cnn_memory.models import (
    alexnet_and_images,
    bytes_of,
    convolution,
    separable_convolution,
    train_alexnet,
)
from pytest_gpumem.prediction.function import predict
from pytest_gpumem.prediction.layers import Layer, layers_of
from pytest_gpumem.prediction.lines import lines_of

# Parameters and FLOPs of one image: a multiplication and an addition count as two.
ALEXNET = {
    "Conv2d": [
        (23_296, 140_553_600),
        (307_392, 447_897_600),
        (663_936, 224_280_576),
        (884_992, 299_040_768),
        (590_080, 199_360_512),
    ],
    "Linear": [(37_752_832, 75_497_472), (16_781_312, 33_554_432), (4_097_000, 8_192_000)],
}


def test_alexnet_layer_by_layer() -> None:
    model, *layers = layers_of(alexnet_and_images)

    products = 1_428_376_960
    # An operation for each element of an activation, eight comparisons for each 3 × 3 window.
    activations, pooling = 493_184, 706_560
    assert (model.parameters, model.flops) == (61_100_840, products + activations + pooling)
    assert sum(layer.flops for layer in layers if layer.kind == "ReLU") == activations
    assert sum(layer.flops for layer in layers if layer.kind == "MaxPool2d") == pooling
    for kind, expected in ALEXNET.items():
        found = [layer for layer in layers if layer.kind == kind]
        assert [(layer.parameters, layer.flops) for layer in found] == expected
    # Convolutions have few parameters and most of the operations.
    parameters, flops = map(sum, zip(*ALEXNET["Conv2d"], strict=True))
    assert round(100 * parameters / model.parameters) == 4
    assert round(100 * flops / model.flops) == 92


def test_linear_layers_count_batch_times_inputs_times_outputs() -> None:
    def call() -> tuple[nn.Module, torch.Tensor]:
        return nn.Linear(100, 50).cuda(), torch.ones(8, 100, device="cuda")

    assert layers_of(call)[0].flops == 2 * 8 * 100 * 50


def layer_of(make: Callable[[], nn.Module]) -> Layer:
    return layers_of(lambda: (make().cuda(), torch.ones(1, 64, 56, 56, device="cuda")))[0]


def test_a_separable_convolution_computes_less_and_keeps_more() -> None:
    usual, separable = layer_of(convolution), layer_of(separable_convolution)

    assert usual.flops == 2 * 128 * 64 * 3 * 3 * 56 * 56 == 462_422_016
    assert separable.flops == 2 * 64 * 3 * 3 * 56 * 56 + 2 * 128 * 64 * 56 * 56 == 54_992_896
    assert usual.training.kept == bytes_of(128, 56, 56) == 1_605_632
    assert separable.training.kept == bytes_of(64 + 128, 56, 56) == 2_408_448


@pytest.mark.parametrize(
    ("batch", "t4", "rtx_4060"), [(128, True, True), (2048, True, False), (4096, False, False)]
)
def test_choosing_a_gpu(batch: int, t4: bool, rtx_4060: bool) -> None:
    found = {gpu: predict(lambda: train_alexnet(batch), gpu) for gpu in ("T4", "RTX-4060")}
    assert {gpu: one.fits for gpu, one in found.items()} == {"T4": t4, "RTX-4060": rtx_4060}


def seven_convolutions() -> None:
    layers = [nn.Conv2d(512, 512, 3, padding=1, bias=False) for _ in range(7)]
    model = nn.Sequential(*layers).cuda()
    x = torch.ones(2, 512, 14, 14, device="cuda")
    del model, x


def test_memory_by_source_line() -> None:
    lines = {line.source: line for line in lines_of(seven_convolutions, [seven_convolutions])}

    (group,) = lines["model = nn.Sequential(*layers).cuda()"].added
    assert (group.count, group.shape, group.kind) == (7, (512, 512, 3, 3), "Parameter")
    assert group.bytes == 66_060_288  # 66.06 MB
    (group,) = lines['x = torch.ones(2, 512, 14, 14, device="cuda")'].added
    assert (group.count, group.shape, group.kind) == (1, (2, 512, 14, 14), "Tensor")
    removed = lines["del model, x"].removed
    assert sum(one.bytes for one in removed) < lines["del model, x"].before
