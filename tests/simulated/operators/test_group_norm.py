"""Group norm of images in both layouts; the events are those of torch's own code, seen on dry."""

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


@pytest.mark.parametrize(
    ("version", "copied", "copied_inside"),
    [("2.13", [IMAGES], []), ("2.14", [], [IMAGES]), ("2.15", [], [])],
)
def test_images_of_channels_last_are_copied_before_2_15(
    on: Any, version: str, copied: list[int], copied_inside: list[int]
) -> None:
    gpu = on("A100-40GB", version)
    norm = nn.GroupNorm(4, 8).cuda()
    x = torch.ones(2, 8, 7, 7, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        events = gpu.of(lambda: norm(x))
    temporaries = [*copied_inside, SCALES, SCALES]
    given_back = [-size for size in reversed(temporaries)]
    freed = [-size for size in copied]
    assert sorted(events) == sorted(
        [*copied, IMAGES, STATISTICS, STATISTICS, *temporaries, *given_back, *freed]
    )
    assert events[-len(given_back + freed) :] == given_back + freed or copied


def test_an_expanded_gradient_is_copied(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    norm = nn.GroupNorm(4, 8).cuda()
    x = torch.ones(2, 8, 7, 7, device="cuda", requires_grad=True)
    output = norm(x)
    gradient = torch.ones((), device="cuda").expand(output.shape)
    weights = 8 * 4
    taken = [IMAGES, IMAGES, weights, weights, SCALES, SCALES, STATISTICS, STATISTICS, SCALES]
    freed = [-STATISTICS, -STATISTICS, -SCALES, -SCALES, -SCALES, -IMAGES]
    events = gpu.of(lambda: output.backward(gradient))
    assert events[: len(taken + freed)] == taken + freed


def test_gradients_of_channels_last_need_one_temporary_less_since_2_15(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    norm = nn.GroupNorm(4, 8).cuda()
    x = torch.ones(2, 8, 7, 7, device="cuda").to(memory_format=torch.channels_last)
    x.requires_grad_()
    output = norm(x)
    gradient = torch.ones_like(output)
    weights = 8 * 4
    taken = [IMAGES, weights, weights, SCALES, SCALES, STATISTICS, STATISTICS]
    freed = [-STATISTICS, -STATISTICS, -SCALES, -SCALES]
    events = gpu.of(lambda: output.backward(gradient))
    assert events[: len(taken + freed)] == taken + freed
