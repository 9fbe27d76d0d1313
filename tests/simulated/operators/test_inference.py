"""Composites under ``inference_mode``, which arrive whole: CUDA runs their parts in C++.

For compilers, torch has other parts of some of them, in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

BATCH, CHANNELS, SIZE = 2, 3, 8


def ones(*shape: int) -> torch.Tensor:
    """Return a tensor of the GPU."""
    return torch.ones(shape, device="cuda")


RESIZED = [
    *[(mode, 1) for mode in ("nearest", "nearest-exact", "linear")],
    *[(mode, 2) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")],
    *[(mode, 3) for mode in ("nearest", "nearest-exact", "trilinear")],
]


@pytest.mark.parametrize(("mode", "dimensions"), RESIZED)
def test_a_resized_image_is_all_that_is_allocated(on: Any, mode: str, dimensions: int) -> None:
    gpu = on()
    image = ones(BATCH, CHANNELS, *[SIZE] * dimensions)
    with torch.inference_mode():
        events = gpu.of(lambda: F.interpolate(image, scale_factor=2, mode=mode))
    assert events == [BATCH * CHANNELS * (2 * SIZE) ** dimensions * 4]


@pytest.mark.parametrize(("mode", "dimensions"), RESIZED)
def test_autocast_resizes_in_float32(on: Any, mode: str, dimensions: int) -> None:
    gpu = on()
    image = ones(BATCH, CHANNELS, *[SIZE] * dimensions).half()
    cast = BATCH * CHANNELS * SIZE**dimensions * 4
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        events = gpu.of(lambda: F.interpolate(image, scale_factor=2, mode=mode))
    assert events == [cast, cast * 2**dimensions, -cast]


def test_padding_of_sequences_fills_one_tensor(on: Any) -> None:
    gpu = on()
    rows = [ones(5, 300), ones(7, 300)]
    with torch.inference_mode():
        assert gpu.of(lambda: nn.utils.rnn.pad_sequence(rows)) == [2 * 7 * 300 * 4]


def test_a_product_with_batches_copies_what_it_expands(on: Any) -> None:
    gpu = on()
    left, right = ones(5, 1, 4, 3), ones(2, 3, 6)
    left @ right  # takes cuBLAS's workspace
    expanded, result = 5 * 2 * 4 * 3 * 4, 5 * 2 * 4 * 6 * 4
    of_right = 5 * 2 * 3 * 6 * 4
    with torch.inference_mode():
        events = gpu.of(lambda: left @ right)
    assert events == [expanded, of_right, result, -of_right, -expanded]


def test_an_empty_tensor_of_classes_allocates_nothing(on: Any) -> None:
    gpu = on()
    nothing = torch.zeros(0, dtype=torch.int64, device="cuda")
    assert gpu.of(lambda: F.one_hot(nothing, 700)) == []


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_sequences_have_their_sizes_on_the_host(
    on: Any, kind: Callable[..., nn.Module], dtype: torch.dtype
) -> None:
    gpu = on()
    layer = kind(8, 16).to("cuda", dtype)
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.ones(5, 3, 8, device="cuda", dtype=dtype), torch.tensor([5, 3, 2])
    )
    with torch.no_grad():
        events = gpu.of(lambda: layer(packed))
    with torch.inference_mode():
        assert gpu.of(lambda: layer(packed)) == events


def test_autocast_casts_the_parts_of_what_it_passes_over(on: Any) -> None:
    # Sizes are those of the dry device with torch 2.15: bias, weight and image, the last first.
    gpu = on()
    image, weight, bias = ones(2, 4, 9, 9), ones(6, 4, 3, 3), ones(6)
    scores, classes = ones(20, 30).bfloat16(), torch.zeros(20, dtype=torch.int64, device="cuda")
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        convolved = gpu.of(lambda: F.conv2d(image, weight, bias, padding="same"))
        loss = gpu.of(lambda: F.cross_entropy(scores, classes))
    assert convolved[:4] == [12, 432, 1296, 1944]
    assert convolved[-3:] == [-1296, -432, -12]
    assert 20 * 30 * 4 in loss  # nll_loss is in float32


def test_autocast_casts_the_parts_of_what_autograd_records_as_one(on: Any) -> None:
    on()
    matrix = torch.rand(20, 30, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.linalg.pinv(matrix).dtype is torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert torch.linalg.pinv(matrix).dtype is torch.float32
    assert torch.linalg.pinv(matrix).dtype is torch.float32


def test_conjugates_are_resolved_in_inference_mode(on: Any) -> None:
    gpu = on()
    x = ones(20, 30)
    with torch.inference_mode():
        events = gpu.of(lambda: torch.fft.hfft(x))
    assert events[:3] == [4800, 4800, 4640]
