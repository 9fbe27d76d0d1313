"""torch.roll makes the allocations of TensorTransformations.cu."""

from __future__ import annotations

from typing import Any

import torch

IMAGES = 2 * 16 * 16 * 8 * 4


def test_roll_of_one_dim_allocates_its_result_alone(on: Any) -> None:
    gpu = on()
    x = torch.randn(2, 16, 16, 8, device="cuda")
    assert gpu.of(lambda: torch.roll(x, 1, 1)) == [IMAGES]
    assert gpu.of(lambda: torch.roll(x, 1)) == [IMAGES]


def test_roll_of_several_dims_runs_one_after_the_other(on: Any) -> None:
    # The shifted windows of a Swin transformer.
    gpu = on()
    x = torch.randn(2, 16, 16, 8, device="cuda", requires_grad=True)
    y = torch.roll(x, shifts=(-3, -3), dims=(1, 2))
    assert gpu.events()[-3:] == [IMAGES, IMAGES, -IMAGES]
    assert gpu.of(lambda: torch.roll(x, (1, 1, 1), (0, 1, 2))) == [
        IMAGES, IMAGES, IMAGES, -IMAGES, -IMAGES,
    ]  # fmt: skip
    gradient = torch.randn_like(y)
    backward = gpu.of(lambda: torch.autograd.grad(y, x, gradient))
    assert backward == [IMAGES, IMAGES, -IMAGES]


def test_a_strided_tensor_is_copied_for_its_first_roll(on: Any) -> None:
    gpu = on()
    x = torch.randn(2, 8, 16, 16, device="cuda").permute(0, 2, 3, 1)
    assert gpu.of(lambda: torch.roll(x, 1, 1)) == [IMAGES, IMAGES, -IMAGES]
    assert gpu.of(lambda: torch.roll(x, 1)) == [IMAGES, IMAGES, -IMAGES]
    assert gpu.of(lambda: torch.roll(x, (1, 1, 1), (0, 1, 2))) == [
        IMAGES, IMAGES, -IMAGES, IMAGES, IMAGES, -IMAGES, -IMAGES,
    ]  # fmt: skip
