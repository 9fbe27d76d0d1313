"""Strides of results are those of torch's C++, which a CPU runs, too, also of dimensions of one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem.simulated.operators.layout import elementwise_strides
from pytest_gpumem.simulated.operators.tables import MAY_OVERRIDE

aten = torch.ops.aten
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

CALLS: dict[str, Call] = {
    "of one": lambda x, y: x.sin(),
    "of two": lambda x, y: x + y,
    "with a number": lambda x, y: x * 2,
    "with a number first": lambda x, y: 1 - x,
    "with a number of the device": lambda x, y: x * torch.tensor(2.0, device=x.device),
    "with a number of the host": lambda x, y: x / torch.tensor(2.0),
    "compared": lambda x, y: x > 0,
    "divided": lambda x, y: x // 2,
    "broadcast": lambda x, y: x + y.amax(-1, keepdim=True),
    "of three": lambda x, y: torch.where(x > y, x, y),
    "of three with a number": lambda x, y: torch.where(x > 0, x, 0.0),
    "a number to a power": lambda x, y: 2**x,
    "to a power": lambda x, y: x**2,
    "converted": lambda x, y: x.half(),
    "promoted": lambda x, y: x.half() * y,
    "masked": lambda x, y: x.masked_fill(y > 0, 1.0),
    "below the diagonal": lambda x, y: x.tril(),
    "turned": lambda x, y: x.flip(0),
    "sorted": lambda x, y: x.sort(-1).values,
    "new": lambda x, y: torch.zeros_like(x),
    "copied": lambda x, y: x.clone(),
    "a gradient of relu": lambda x, y: aten.threshold_backward(x, y, 0),
    "a gradient of hardsigmoid": lambda x, y: aten.hardsigmoid_backward(x, y),
    "a gradient of softplus": lambda x, y: aten.softplus_backward(x, y, 1.0, 20.0),
    "a gradient of binary cross entropy": lambda x, y: aten.binary_cross_entropy_backward(x, y, x),
}


def tensors(seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of one shape, whose dimensions, some of one, have any order."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 4, 4, 5])
    shape = [rng.choice([1, 1, 2, 3, 8]) for _ in range(count)]

    def one() -> torch.Tensor:
        order = rng.sample(range(count), count)
        made = torch.ones([shape[dim] for dim in order], device=device)
        made = made.permute([order.index(dim) for dim in range(count)])
        ones = [dim for dim in range(count) if shape[dim] == 1]
        if ones and rng.random() < 0.5:
            dim = rng.choice(ones)
            made = made.squeeze(dim).unsqueeze(dim)
        return made

    first = one()
    return first, one() if rng.random() < 0.5 else first.clone()


def strides(call: Call, device: str) -> Iterator[tuple[int, ...]]:
    for seed in range(60):
        x, y = tensors(seed, device)
        yield (*x.shape, *x.stride(), *call(x, y).stride())


@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_strides_of_the_same_code_on_a_cpu(on: Any, name: str) -> None:
    if name == "a number to a power" and not MAY_OVERRIDE:
        pytest.skip("before 2.8 torch's kernels for meta cannot be replaced")
    expected = list(strides(CALLS[name], "cpu"))
    on()
    assert list(strides(CALLS[name], "cuda")) == expected


def test_an_image_of_its_own_keeps_its_stride_beside_a_number() -> None:
    """A batch of one whose rows are as far apart as its images (TensorIterator.cpp)."""
    image = torch.empty_strided((1, 64, 32, 32), (64, 1, 2048, 64))
    assert elementwise_strides((1, 64, 32, 32), [image]) == (65536, 1, 2048, 64)
    assert elementwise_strides((1, 64, 32, 32), [image], beside_number=True) == (64, 1, 2048, 64)


def test_a_convolution_of_one_image_made_of_bytes(on: Any) -> None:
    """Seen on the dry device, torch 2.15: such an image does not count as channels last."""
    on()
    pixels = torch.zeros(224, 224, 3, dtype=torch.uint8).cuda()
    image = pixels.permute(2, 0, 1).unsqueeze(0).float() / 255
    conv = nn.Conv2d(3, 64, 7, 2, 3).cuda()
    with torch.no_grad():
        features = conv(image)
    assert image.stride() == (3, 1, 672, 3)
    assert features.stride() == (802816, 12544, 112, 1)
    # Bytes, two images, the weight and the bias, and 64 x 112 x 112 numbers of 4 bytes.
    kept = 150_528 + 602_112 + 37_888 + 512 + 3_211_264
    assert torch.cuda.memory_allocated() == kept
