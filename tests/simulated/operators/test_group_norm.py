"""Group norm of images in both layouts; the events are those of torch on the dry device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

IMAGES = 2 * 8 * 7 * 7 * 4
STATISTICS = 2 * 4 * 4
"""Of two images and four groups."""
SCALES = 2 * 8 * 4
"""Of two images and eight channels."""


RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
"""Whether a copy is made before belongs to the torch that runs, which takes group norm apart."""


@pytest.mark.skipif(RELEASE >= (2, 14), reason="2.14 copies inside, 2.15 not at all")
def test_images_of_channels_last_are_copied_before(on: Any) -> None:
    gpu = on()
    norm = nn.GroupNorm(4, 8).cuda()
    x = torch.ones(2, 8, 7, 7, device="cuda").to(memory_format=torch.channels_last)
    taken = [IMAGES, IMAGES, STATISTICS, STATISTICS, SCALES, SCALES]
    assert gpu.of(lambda: norm(x))[: len(taken)] == taken


@pytest.mark.skipif(RELEASE < (2, 15), reason="2.15 is the first with kernels for them")
def test_images_of_channels_last_are_not_copied_since_2_15(on: Any) -> None:
    gpu = on()
    norm = nn.GroupNorm(4, 8).cuda()
    x = torch.ones(2, 8, 7, 7, device="cuda").to(memory_format=torch.channels_last)
    taken = [IMAGES, STATISTICS, STATISTICS, SCALES, SCALES, -SCALES, -SCALES]
    x.requires_grad_()
    output: list[torch.Tensor] = []
    assert gpu.of(lambda: output.append(norm(x))) == taken
    gradient = torch.ones_like(output[0])
    weights = 8 * 4
    # One temporary less than for contiguous images.
    taken = [IMAGES, weights, weights, SCALES, SCALES, STATISTICS, STATISTICS]
    freed = [-STATISTICS, -STATISTICS, -SCALES, -SCALES]
    events = gpu.of(lambda: output[0].backward(gradient))
    assert events[: len(taken + freed)] == taken + freed


def test_an_expanded_gradient_is_copied(on: Any) -> None:
    gpu = on()
    norm = nn.GroupNorm(4, 8).cuda()
    x = torch.ones(2, 8, 7, 7, device="cuda", requires_grad=True)
    output = norm(x)
    gradient = torch.ones((), device="cuda").expand(output.shape)
    weights = 8 * 4
    taken = [IMAGES, IMAGES, weights, weights, SCALES, SCALES, STATISTICS, STATISTICS, SCALES]
    freed = [-STATISTICS, -STATISTICS, -SCALES, -SCALES, -SCALES, -IMAGES]
    events = gpu.of(lambda: output.backward(gradient))
    assert events[: len(taken + freed)] == taken + freed


@pytest.mark.parametrize("version", ["2.13", "2.14"])
def test_the_gradient_of_vectors_sums_each_channel_before_2_14(on: Any, version: str) -> None:
    gpu = on("A100-40GB", version)
    norm = nn.GroupNorm(4, 8).cuda()
    output = norm(torch.ones(2, 8, device="cuda", requires_grad=True))
    gradient = torch.ones_like(output)
    vectors, weights = 2 * 8 * 4, 8 * 4
    sums = [SCALES, SCALES] if version == "2.13" else []
    taken = [vectors, weights, weights, *sums, STATISTICS, STATISTICS]
    assert gpu.of(lambda: output.backward(gradient))[: len(taken)] == taken
